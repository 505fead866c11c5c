"""Assembly of the spans of all ranks into one trace. The trace uses the clock of rank 0, contains an arrow for each
message, and shows the measured and the simulated pipeline of each step. This module does not import torch.

The time of an action is the duration of its slice without the initial wait for its message. The simulation uses the
run's action lists and the median time of each kind of action on each stage. A measured step takes longer than the
simulated step, because action times vary and ranks therefore wait for each other.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.pipeline_parallel.actions import COMPUTE, SENDS, Action, Kind, Lists, counterpart
from megatron.core.pipeline_parallel.walk import TIMED, Timed
from megatron.extensions.observe.diagnosis.trace.trace_file import (
    PLANNED_TRACK,
    Event,
    Trace,
    async_events,
    flow_events,
    process_events,
    slice_event,
)
from megatron.extensions.plan.simulator.simulator import Simulation, StageCosts, simulate

PIPELINE = "pipeline"
"""Category of the slices that show pipeline actions."""


@dataclass(frozen=True)
class MeasuredStep:
    """Actions of one pipeline in one iteration, by pipeline rank. Times are in microseconds since the start of the
    trace."""

    iteration: int
    ranks: tuple[int, ...]
    """Global ranks of the pipeline, in stage order."""

    timeline: list[list[Timed]]
    """Forward and backward actions, one list per pipeline rank. The time of an action does not include the initial wait
    for its message."""

    @property
    def start(self) -> float:
        return min(timed.start for timeline in self.timeline for timed in timeline)

    @property
    def stop(self) -> float:
        return max(timed.stop for timeline in self.timeline for timed in timeline)

    @property
    def makespan(self) -> float:
        return self.stop - self.start

    @property
    def bubble(self) -> float:
        """Share of the step during which a rank is idle, averaged over the ranks of the pipeline, as in
        `Simulation.bubble`. The step lasts from the first start to the last end of an action."""
        busy = sum(covered((timed.start, timed.stop) for timed in timeline) for timeline in self.timeline)
        return 1 - busy / (len(self.ranks) * self.makespan) if self.makespan else 0.0

    @property
    def microbatches(self) -> int:
        return 1 + max(timed.action.microbatch for timeline in self.timeline for timed in timeline)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of time spans. Spans of interleaved passes overlap; overlapping time is counted
    once."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def measured_steps(trace: Trace) -> list[MeasuredStep]:
    """Return the actions of every pipeline in every traced iteration. Within an iteration, pipelines are ordered by
    their first rank.

    On GPUs, the times of actions are the times at which their kernels ran on the device streams.
    """
    pipelines = trace["otherData"]["pipelines"]
    of_rank = {rank: number for number, ranks in enumerate(pipelines) for rank in ranks}
    found: dict[tuple[int, int], dict[int, dict[Action, Timed]]] = defaultdict(lambda: defaultdict(dict))
    for event, action, began in actions_of(trace):
        iteration, rank = event["args"]["iteration"], event["pid"]
        if action.kind in COMPUTE:
            timed = Timed(action, began, event["ts"] + event["dur"])
            found[iteration, of_rank[rank]][rank][action] = timed  # if a step ran several times, the last run is used
    steps = []
    for (iteration, number), by_rank in sorted(found.items()):
        ranks = tuple(pipelines[number])
        if all(by_rank.get(rank) for rank in ranks):
            timeline = [sorted(by_rank[rank].values(), key=lambda timed: timed.start) for rank in ranks]
            steps.append(MeasuredStep(iteration, ranks, timeline))
    return steps


def actions_of(trace: Trace) -> list[tuple[Event, Action, float]]:
    """Return a tuple (slice, action, start time) for each slice of a training action. The start time excludes the
    initial wait for the action's message."""
    device = trace["otherData"]["device"] == "cuda"
    gpu = {
        (event["pid"], event["tid"])
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name" and event["args"]["name"].startswith("GPU, ")
    }
    waits: dict[tuple[int, int], list[Event]] = defaultdict(list)
    actions: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        place = event["pid"], event.get("tid", 0)
        if event["ph"] != "X" or (place in gpu) != device:
            continue
        if event.get("cat") == PIPELINE and "iteration" in event["args"]:
            actions[place].append(event)
        elif event.get("cat") == "wait" and event["args"].get("axis") == "pp":
            waits[place].append(event)
    found = []
    for place, events in actions.items():
        pending = sorted(waits[place], key=lambda wait: wait["ts"])
        at = 0
        for event in sorted(events, key=lambda event: event["ts"]):
            while at < len(pending) and pending[at]["ts"] < event["ts"]:
                at += 1
            began, args = event["ts"], event["args"]
            action = Action(Kind(args["kind"]), args["stage"], args["microbatch"])
            if action.kind in (Kind.F, Kind.B, Kind.I) and at < len(pending):
                end = pending[at]["ts"] + pending[at]["dur"]
                # A wait that ends within the slice is the wait for the action's input message. This wait is not a wait
                # for a send, because an action sends nothing before it ends.
                began = min(end, event["ts"] + event["dur"]) if end <= event["ts"] + event["dur"] + 1e-2 else began
            found.append((event, action, began))
    return found


def median_costs(steps: Sequence[MeasuredStep], waited: Sequence[float] = ()) -> StageCosts:
    """Return the costs of the pipeline stages in microseconds: the median time of each kind of action on each stage,
    and the median transfer time of a message. The argument `waited` contains the transfer times that `message_times`
    returns."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for step in steps:
        for timeline in step.timeline:
            for action, start, stop in timeline:
                times[action.kind, action.stage].append(stop - start)
    stages = range(1 + max(stage for _, stage in times))

    def median(kind: Kind, stage: int) -> float:
        return statistics.median(times[kind, stage]) if (kind, stage) in times else 0.0

    whole = [median(Kind.B, stage) for stage in stages]
    halves = [median(Kind.I, stage) for stage in stages]
    weights = [median(Kind.W, stage) for stage in stages]
    # An action list runs the backward passes of a stage either as a whole (B) or in two halves (I and W). If a trace
    # contains both, the times of the halves are used.
    backwards = [half or back for half, back in zip(halves, whole, strict=True)]
    forwards = [median(Kind.F, stage) for stage in stages]
    return StageCosts(forwards, backwards, weights, comm=statistics.median(waited) if waited else 0.0)


def message_times(trace: Trace, steps: Sequence[MeasuredStep]) -> list[float]:
    """Return the transfer times, in microseconds, of the messages that their receivers waited for.

    A transfer time starts when the action that computed the message ends, and it ends when the action that uses the
    message starts. Messages that arrive before they are needed are omitted, because their transfer times do not delay
    the step.
    """
    stops: dict[tuple[int, int, Action], float] = {}
    owners: dict[tuple[int, int, int], int] = {}
    for step in steps:
        for rank, timeline in zip(step.ranks, step.timeline, strict=True):
            for action, _, stop in timeline:
                stops[step.iteration, step.ranks[0], action] = stop
                owners[step.iteration, step.ranks[0], action.stage] = rank
    pipeline = {rank: ranks[0] for ranks in trace["otherData"]["pipelines"] for rank in ranks}
    found = []
    for event, action, began in actions_of(trace):
        if action.kind not in (Kind.F, Kind.B, Kind.I):
            continue
        place = event["args"]["iteration"], pipeline[event["pid"]]
        before = action.stage + (-1 if action.kind is Kind.F else 1)
        if owners.get((*place, before), event["pid"]) == event["pid"]:
            continue
        source = stops.get((*place, action._replace(stage=before)))
        if source is not None and event["ts"] < source <= began:
            found.append(began - source)
    return found


def message_arrows(slices: Mapping[Action, Event]) -> list[tuple[str, Event, Event]]:
    """Return a tuple (name, source, target) for each message of one pipeline in one step. `source` is the slice that
    sends the message, and `target` is the slice of the action that uses the message."""
    found = []
    for action, source in slices.items():
        if action.kind in SENDS:
            receive = counterpart(action)
            kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
            users = (slices.get(Action(kind, receive.stage, receive.microbatch)) for kind in kinds)
            found += [(str(action), source, user) for user in users if user is not None]
    return found


def summary(steps: Sequence[MeasuredStep], plan: Simulation | None) -> dict[str, float]:
    """Return the step time and the bubble fraction of the measured pipeline and of the simulated pipeline. The measured
    values are medians over all iterations and pipelines."""
    if not steps:
        return {}
    found = {
        "measured_us": statistics.median(step.makespan for step in steps),
        "measured_bubble": statistics.median(step.bubble for step in steps),
    }
    if plan is not None:
        found |= {"planned_us": plan.makespan, "planned_bubble": plan.bubble}
    return found


SpanRow = tuple[str, str, str, int, int, Mapping[str, object]]
"""Span as a row [track, name, category, start, stop, args]. Times are in nanoseconds on the clock of the rank's
host."""


@dataclass(frozen=True)
class RankTrace:
    """Recorded spans of one rank."""

    spans: Sequence[SpanRow]
    in_flight: Sequence[SpanRow]
    facts: Mapping[str, Any]
    """Coordinates, host, clock and memory of the rank, for `otherData`."""

    to_common: Callable[[int], int]
    """Function that converts nanoseconds on the rank's clock to nanoseconds on rank 0's clock."""


def assemble(ranks: Sequence[RankTrace], other: Mapping[str, object], lists_of: Callable[[int], Lists] | None) -> Trace:
    """Assemble the trace of all ranks. `ranks` contains the traces in rank order. `other` is copied to the trace's
    `otherData`, and must contain `pipelines` and `device`. `lists_of(microbatches)` returns the action lists of a step
    with this number of micro-batches. The simulation of a step uses these lists. If `lists_of` is None, no step is
    simulated.
    """
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
    """Format a rank as "rank 5 (pp 1, tp 1) on HOST". Axes of size 1 are omitted."""
    coords = ", ".join(f"{axis} {at}" for axis, at in facts.get("coords", {}).items())
    return f"rank {rank}{f' ({coords})' if coords else ''} on {facts.get('host', '?')}"


def _track_order(row: SpanRow) -> tuple[bool, str]:
    return row[0].startswith("GPU, "), row[0] if row[0].startswith("thread ") else ""


def _microseconds(to_common: Callable[[int], int], origin: int) -> Callable[[int], float]:
    return lambda nanoseconds: (to_common(nanoseconds) - origin) / 1e3


def _add_arrows(trace: Trace) -> None:
    """Add an arrow from each send to the action on the receiving rank that uses the message."""
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
    """Add the simulated actions of a step to a separate track of each rank. `at` is the start time of the simulated
    step. A simulated step starts when the measured step starts or when the previous simulated step ends, whichever is
    later.
    """
    for rank, track, timeline in zip(step.ranks, tracks, plan.timeline, strict=True):
        for action, start, stop in timeline:
            if action.kind in TIMED and stop > start:
                args = {"kind": action.kind.value, "stage": action.stage, "microbatch": action.microbatch}
                begin, end = at + start, at + stop
                args["planned_iteration"] = step.iteration
                event = slice_event(rank, track, str(action), PLANNED_TRACK, begin, end, args)
                trace["traceEvents"].append(event)
