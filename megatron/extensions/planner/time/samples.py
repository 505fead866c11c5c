"""What a part of the model does with more samples, from what it does with one and with two. No torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megatron.extensions.planner.time.events import Collective, Event, PassEvents, Wait

PASSES = ("forward", "backward", "weight", "once")


def of_more_samples(one: PassEvents, two: PassEvents, samples: int) -> PassEvents | None:
    """The events of a micro-batch of `samples`, if each number in them grows by the same with every sample; None where
    one and two samples do different things."""
    passes: dict[str, Any] = {name: _of_pass(getattr(one, name), getattr(two, name), samples) for name in PASSES}
    if any(events is None for events in passes.values()):
        return None
    return replace(two, **passes, offloaded=_grown(one.offloaded, two.offloaded, samples))


def _of_pass(one: tuple[Event, ...], two: tuple[Event, ...], samples: int) -> tuple[Event, ...] | None:
    if len(one) != len(two) or any(type(a) is not type(b) for a, b in zip(one, two, strict=True)):
        return None
    events = [_of_event(a, b, samples) for a, b in zip(one, two, strict=True)]
    return None if None in events else tuple(event for event in events if event is not None)


def _of_event(one: Event, two: Event, samples: int) -> Event | None:
    values: dict[str, Any] = {}
    for field in fields(two):
        a, b = getattr(one, field.name), getattr(two, field.name)
        if field.name == "number" and isinstance(two, Collective | Wait):
            continue  # names the collective
        if isinstance(b, bool | str):
            if a != b:
                return None
        else:
            values[field.name] = _grown(a, b, samples)
    return replace(two, **values)


def _grown(one: Any, two: Any, samples: int) -> Any:
    return one + (two - one) * (samples - 1)


def same_events(one: PassEvents, two: PassEvents) -> bool:
    """Whether two lists are equal but for the numbers that name collectives."""
    return all(
        [_unnumbered(event) for event in getattr(one, name)] == [_unnumbered(event) for event in getattr(two, name)]
        for name in PASSES
    ) and (one.offloaded == two.offloaded)


def _unnumbered(event: Event) -> Event:
    return replace(event, number=0) if isinstance(event, Collective | Wait) else event
