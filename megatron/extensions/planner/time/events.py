"""What a rank does in a pass through a layer, in order: products, attention, moved bytes and collectives. No torch.

A list of events depends on the shapes of a rank's part of the model alone, not on a device or on where ranks lie, so
that one list serves predictions for all devices and all placements of its groups.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Product:
    """`batches` matrix products [m, k] x [k, n]."""

    precision: str
    """bf16 (fp16 too), fp8, fp32 or fp64: of the operands."""

    m: int
    n: int
    k: int
    batches: int = 1
    moved: int = 0
    """Bytes of operands and result."""

    sums: int = 0
    """Bytes of fp32 sums that the product is added to, read and written."""

    expert: bool = False
    """Whether the rows are tokens that a router has sent here."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One launch of a fused attention kernel."""

    backend: str
    """cudnn, flash, flash3, triton (with dropout), or auto: the device's fastest without dropout."""

    width: int
    """Channels of a head."""

    flops: float
    """FLOPs that the kernel does: hidden pairs not counted, recomputed scores in the backward counted."""

    length: int
    """Keys of the launch."""

    backward: bool

    hashes: float = 0.0
    """Pairs whose mask of dropout the kernel hashes, each as often as it does so."""


@dataclass(frozen=True, slots=True)
class Move:
    """An element-wise kernel, or a fused one, by the bytes that it reads and writes."""

    moved: int


@dataclass(frozen=True, slots=True)
class Collective:
    """The start of a collective over an axis of the mesh. `Wait` with the same number completes it."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send (to the next rank of the axis)."""

    moved: int
    """Bytes of the whole operand: what a gather results in, what a reduction reads, what a rank sends otherwise."""

    axis: str
    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The computation needs the result of a collective."""

    number: int


Event = Product | Attention | Move | Collective | Wait


@dataclass(frozen=True)
class PassEvents:
    """What one micro-batch does in a part of a stage."""

    forward: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    """The gradient of the input, and of weights where the schedule does not defer them."""

    weight: tuple[Event, ...] = ()
    """Deferred gradients of weights (W of zero-bubble schedules)."""

    once: tuple[Event, ...] = ()
    """In the first micro-batch of a step alone: casts of weights to fp8."""

    offloaded: int = 0
    """Bytes copied to the host in the forward, and back in the backward."""


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
