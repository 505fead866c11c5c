"""The wall time of a run by what it was spent on, over all its starts. This module does not import torch.

Goodput is useful step time over wall time:

    wall    = useful + startup + evaluation + save + repeated + rolled_back + skipped + idle + other
    goodput = useful / wall

Each start writes the event `goodput` to `run_events.jsonl`, with the seconds of every part up to then. The next start
continues from the last such event. It also looks for the event at the iteration that it resumes from: step time that is
not yet in that event has to be spent again, so it becomes `repeated`.
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
"""The parts of the wall time, and their names in the log."""

ADDED = ("rolled_back",)
"""Parts that events of older runs do not have: they count as 0 there."""

EVENT = "goodput"
"""The event of `run_events.jsonl`: iteration, "began" (first start, seconds since 1970), and "seconds" by part."""

Seconds = dict[str, float]


@dataclass(frozen=True)
class Earlier:
    """Time that earlier starts of a run have spent."""

    began: float
    """Time of the first start, in seconds since 1970."""

    seconds: Seconds
    """Seconds by part, up to the beginning of this start."""


@dataclass(frozen=True)
class _Event:
    """One event `goodput`."""

    iteration: int
    began: float
    seconds: Seconds

    @property
    def of_steps(self) -> float:
        """Step time that the weights of its iteration contain, with that of skipped steps."""
        return self.seconds["useful"] + self.seconds["skipped"]


def none() -> Seconds:
    """No time in any part."""
    return dict.fromkeys(PARTS, 0.0)


def goodput(seconds: Mapping[str, float]) -> float:
    """Return useful seconds over all seconds; 0 if there are none."""
    wall = sum(seconds.values())
    return seconds["useful"] / wall if wall > 0 else 0.0


def values(seconds: Mapping[str, float]) -> dict[str, float]:
    """The values of a metric record: `goodput`, and `goodput_PART_seconds` of each part."""
    return {"goodput": goodput(seconds)} | {f"goodput_{part}_seconds": seconds[part] for part in PARTS}


def line(record: Mapping[str, object]) -> str:
    """The line of the log, from a record with `values`. Parts below 0.05 % are left out."""
    found = {part: float(str(record[f"goodput_{part}_seconds"])) for part in PARTS}
    wall = sum(found.values())
    shares = {part: 100 * spent / wall if wall > 0 else 0.0 for part, spent in found.items()}
    rest = [f"{PARTS[part]} {share:.1f} %" for part, share in shares.items() if part != "useful" and share >= 0.05]
    return " | ".join([f" goodput {shares['useful']:.1f} % of {duration(wall)}", *rest])


def earlier_starts(events: Iterable[Mapping[str, object]], iteration: int, started: float) -> Earlier:
    """Return what earlier starts of a run have spent, for a process that started at `started`, in seconds since 1970,
    and resumes from `iteration`. The events are read once and not kept: a long run has many.

    A start at iteration 0 begins a new run if there are saves that it could have resumed from.
    """
    last: _Event | None = None
    contained: _Event | None = None  # the newest of the same run at the iteration, or else at the largest before it
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
    """(iteration, seconds by part) of the last event `goodput`; None without one."""
    found = [event for event in map(_event_of, events) if event is not None]
    return (found[-1].iteration, found[-1].seconds) if found else None


def _save_time(event: Mapping[str, object]) -> float:
    """When a save has succeeded; 0 for all other events."""
    succeeded = event.get("event") == "save" and "error" not in event
    return (_number(event.get("time")) or 0.0) if succeeded else 0.0


def _event_of(event: Mapping[str, object]) -> _Event | None:
    """An event `goodput`; None for all others, and for a damaged one."""
    seconds, iteration = event.get("seconds"), event.get("iteration")
    began = _number(event.get("began"))
    if event.get("event") != EVENT or not isinstance(seconds, Mapping) or not isinstance(iteration, int):
        return None
    found = {part: _number(seconds.get(part, 0 if part in ADDED else None)) for part in PARTS}
    known = {part: value for part, value in found.items() if value is not None}
    return _Event(iteration, began, known) if began is not None and len(known) == len(PARTS) else None


def _number(value: object) -> float | None:
    """A number that is not negative; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < float("inf") else None
