"""One trace from the spans of all ranks: on one clock, with arrows for messages and the planned pipeline. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.pipeline_parallel.actions import Action, Lists
from megatron.core.pipeline_parallel.walk import TIMED
from megatron.extensions.diagnosis.trace.pipeline_timeline import (
    MeasuredStep,
    actions_of,
    measured_steps,
    median_costs,
    message_arrows,
    message_times,
    summary,
)
from megatron.extensions.diagnosis.trace.trace_file import (
    PLANNED_TRACK,
    Event,
    Trace,
    async_events,
    flow_events,
    process_events,
    slice_event,
)
from megatron.extensions.simulator.simulator import Simulation, simulate

SpanRow = Sequence[Any]
"""[track, name, category, start, stop, args], times in nanoseconds of the rank's own clock."""


@dataclass(frozen=True)
class RankTrace:
    """The recording of one rank."""

    spans: Sequence[SpanRow]
    in_flight: Sequence[SpanRow]
    facts: Mapping[str, Any]
    """Coordinates, host and memory, for `otherData`."""

    to_common: Callable[[int], int]
    """Maps nanoseconds of the rank's clock to those of rank 0's."""


def assemble(ranks: Sequence[RankTrace], other: Mapping[str, Any], lists_of: Callable[[int], Lists] | None) -> Trace:
    """The trace of all ranks, in order. `other` is copied to `otherData`, and has `pipelines` and `device`;
    `lists_of(microbatches)` are the action lists of a step, for the plan."""
    origin = min((rank.to_common(row[3]) for rank in ranks for row in (*rank.spans, *rank.in_flight)), default=0)
    events: list[Event] = []
    tracks: list[list[str]] = []
    for number, rank in enumerate(ranks):
        tracks.append(list(dict.fromkeys(row[0] for row in sorted(rank.spans, key=_track_order))))
        place = {track: at for at, track in enumerate(tracks[-1])}
        events += process_events(number, rank_name(number, rank.facts), [*tracks[-1], PLANNED_TRACK])
        time = _microseconds(rank.to_common, origin)
        for track, name, category, start, stop, args in rank.spans:
            events.append(slice_event(number, place[track], name, category, time(start), time(stop), args))
        for flight, (_, name, category, start, stop, args) in enumerate(rank.in_flight):
            events += async_events(number, flight, name, category, time(start), time(stop), args)
    trace: Trace = {
        "displayTimeUnit": "ms",
        "otherData": dict(other) | {"ranks": [dict(rank.facts) for rank in ranks]},
        "traceEvents": events,
    }
    _add_arrows(trace)
    steps = measured_steps(trace)
    plan = None
    if steps and lists_of is not None:
        costs = median_costs(steps, message_times(trace, steps))
        plan = simulate(lists_of(steps[0].microbatches), costs)
        trace["otherData"]["costs"] = {
            "forward_us": costs.forward,
            "backward_us": costs.input_grad,
            "weight_grad_us": costs.weight_grad,
            "message_us": costs.comm,
        }
        ends: dict[Sequence[int], float] = {}
        for step in sorted(steps, key=lambda step: step.start):
            if step.microbatches == steps[0].microbatches:
                begin = max(step.start, ends.get(tuple(step.ranks), step.start))
                _add_plan(trace, step, begin, plan, [len(tracks[rank]) for rank in step.ranks])
                ends[tuple(step.ranks)] = begin + plan.makespan
    trace["otherData"]["pipeline"] = summary(steps, plan)
    return trace


def rank_name(rank: int, facts: Mapping[str, Any]) -> str:
    """As "rank 5 (pp 1, tp 1) on HOST": without the axes along which all ranks are at 0."""
    coords = ", ".join(f"{axis} {at}" for axis, at in facts.get("coords", {}).items())
    return f"rank {rank}{f' ({coords})' if coords else ''} on {facts.get('host', '?')}"


def _track_order(row: SpanRow) -> tuple[bool, str]:
    return row[0].startswith("GPU, "), row[0] if row[0].startswith("thread ") else ""


def _microseconds(to_common: Callable[[int], int], origin: int) -> Callable[[int], float]:
    return lambda nanoseconds: (to_common(nanoseconds) - origin) / 1e3


def _add_arrows(trace: Trace) -> None:
    """From each send to the action on the other rank that uses the message."""
    pipeline = {rank: number for number, ranks in enumerate(trace["otherData"]["pipelines"]) for rank in ranks}
    steps: dict[tuple[int, int], dict[Action, Event]] = defaultdict(dict)
    for event, action, _ in actions_of(trace):
        steps[event["args"]["iteration"], pipeline[event["pid"]]][action] = event
    number = 0
    for slices in steps.values():
        for name, source, target in message_arrows(slices):
            if target["ts"] + target["dur"] >= source["ts"]:
                trace["traceEvents"] += flow_events(number, name, source, target)
                number += 1


def _add_plan(trace: Trace, step: MeasuredStep, at: float, plan: Simulation, tracks: Sequence[int]) -> None:
    """The planned actions of a step on a track of each rank. It begins `at` the time of the measured one, or later: a
    step that was quicker than planned ends before its plan does."""
    for rank, track, timeline in zip(step.ranks, tracks, plan.timeline, strict=True):
        for action, start, stop in timeline:
            if action.kind in TIMED and stop > start:
                args = {"kind": action.kind.value, "stage": action.stage, "microbatch": action.microbatch}
                begin, end = at + start, at + stop
                args["planned_iteration"] = step.iteration
                event = slice_event(rank, track, str(action), PLANNED_TRACK, begin, end, args)
                trace["traceEvents"].append(event)
