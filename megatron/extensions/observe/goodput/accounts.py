"""Breakdown of a run's wall time, summed over all starts of the run. This module does not import torch.

Goodput is useful step time over wall time:

    wall    = useful + startup + evaluation + save + repeated + rolled_back + skipped + idle + other
    goodput = useful / wall

Each start writes `goodput` events to `run_events.jsonl`. An event contains the seconds that every part of the wall time
has taken since the first start of the run. After the run is started again, its new seconds are added to the seconds in
the last `goodput` event. If the run resumes from an earlier iteration than the iteration of the last event, steps run
again. To count the earlier time of these steps as `repeated`, the run also reads the event of the iteration from which
it resumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.training.metrics.console import duration

PARTS = {
    "useful": "useful steps",
    "startup": "start-up",
    "evaluation": "evaluation",
    "save": "saves",
    "repeated": "repeated steps",
    "rolled_back": "rolled-back steps",
    "skipped": "skipped steps",
    "idle": "idle between starts",
    "other": "other",
}
"""Maps each part of the wall time to its name in the log."""

ADDED = ("rolled_back",)
"""Parts of the wall time that were added later, so events of older runs lack them. A missing part counts as 0."""

EVENT = "goodput"
"""Name of the event in `run_events.jsonl`. The fields of the event are "iteration", "began" (time of the first start of
the run, in seconds since 1970), and "seconds" (seconds of each part of the wall time)."""

Seconds = dict[str, float]


@dataclass(frozen=True)
class Earlier:
    """Wall time of a run before its current start."""

    began: float
    """Time of the first start of the run, in seconds since 1970."""

    seconds: Seconds
    """Seconds of each part of the wall time before the current start."""


@dataclass(frozen=True)
class _Event:
    """A `goodput` event, as read from `run_events.jsonl`."""

    iteration: int
    began: float
    seconds: Seconds

    @property
    def of_steps(self) -> float:
        """Seconds spent on the steps up to the event's iteration, including skipped steps. Repeated and rolled-back
        steps are not included."""
        return self.seconds["useful"] + self.seconds["skipped"]


def none() -> Seconds:
    """Return a dict that maps every part of the wall time (`PARTS`) to 0 seconds."""
    return dict.fromkeys(PARTS, 0.0)


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the useful seconds divided by all seconds; 0 if there are no seconds."""
    wall = sum(seconds.values())
    return seconds["useful"] / wall if wall > 0 else 0.0


def values(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the goodput values of a metric record: `goodput`, and `goodput_PART_seconds` for each part."""
    return {"goodput": goodput(seconds)} | {f"goodput_{part}_seconds": seconds[part] for part in PARTS}


def line(record: Mapping[str, object]) -> str:
    """Format the goodput line of the log. `record` must contain the entries that `values` returns. Parts below 0.05 %
    are omitted."""
    found = {part: float(str(record[f"goodput_{part}_seconds"])) for part in PARTS}
    wall = sum(found.values())
    shares = {part: 100 * spent / wall if wall > 0 else 0.0 for part, spent in found.items()}
    rest = [f"{PARTS[part]} {share:.1f} %" for part, share in shares.items() if part != "useful" and share >= 0.05]
    return " | ".join([f" goodput {shares['useful']:.1f} % of {duration(wall)}", *rest])


def earlier_starts(events: Iterable[Mapping[str, object]], iteration: int, started: float) -> Earlier:
    """Return the wall time of a run before its current start. The current process started at `started`, in seconds
    since 1970, and resumes from `iteration`. Events are processed one by one and not kept in memory, because a long run
    has many events. If the process starts at iteration 0 although there is a checkpoint from which it could have
    resumed, it counts as a new run.
    """
    last: _Event | None = None
    contained: _Event | None = None  # newest `goodput` event of this run whose iteration is at most `iteration`
    saved = 0.0
    for event in events:
        saved = max(saved, _save_time(event))
        if (found := _event_of(event)) is None:
            continue
        if last is not None and found.began != last.began:
            contained = None
        last = found
        if found.iteration <= iteration and (contained is None or contained.iteration <= found.iteration):
            contained = found
    if last is None or (iteration == 0 and saved >= last.began):
        return Earlier(started, none())
    of_steps = last.of_steps + last.seconds["repeated"]
    kept = contained.of_steps if contained is not None else 0.0
    idle = max(0.0, started - (last.began + sum(last.seconds.values())))
    seconds = last.seconds | {
        "useful": contained.seconds["useful"] if contained is not None else 0.0,
        "skipped": contained.seconds["skipped"] if contained is not None else 0.0,
        "repeated": max(0.0, of_steps - kept),
        "idle": last.seconds["idle"] + idle,
    }
    return Earlier(last.began, seconds)


def last_account(events: Iterable[Mapping[str, object]]) -> tuple[int, Seconds] | None:
    """Return the iteration and the seconds of each part from the last `goodput` event; None if there is no such
    event."""
    found = [event for event in map(_event_of, events) if event is not None]
    return (found[-1].iteration, found[-1].seconds) if found else None


def _save_time(event: Mapping[str, object]) -> float:
    """Return the time of an event that reports a successful save; 0 for any other event."""
    succeeded = event.get("event") == "save" and "error" not in event
    return (_number(event.get("time")) or 0.0) if succeeded else 0.0


def _event_of(event: Mapping[str, object]) -> _Event | None:
    """Parse a `goodput` event. Return None for other events and for damaged events."""
    seconds, iteration = event.get("seconds"), event.get("iteration")
    began = _number(event.get("began"))
    if event.get("event") != EVENT or not isinstance(seconds, Mapping) or not isinstance(iteration, int):
        return None
    found = {part: _number(seconds.get(part, 0 if part in ADDED else None)) for part in PARTS}
    known = {part: value for part, value in found.items() if value is not None}
    return _Event(iteration, began, known) if began is not None and len(known) == len(PARTS) else None


def _number(value: object) -> float | None:
    """Convert a finite, non-negative number to float. Return None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < float("inf") else None
