"""Simulated traces, whose slices (spans of pipeline actions) are the same as in the trace of a real run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.actions import COMPUTE, Lists
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.extensions.observe.diagnosis.trace.pipeline_timeline import RankTrace, assemble
from megatron.extensions.observe.diagnosis.trace.trace_file import Event, Trace, malformed
from megatron.extensions.plan.simulator.simulator import StageCosts, simulate

MS = 1_000_000


def simulated_trace(
    schedule: str = "zb-h1", pp: int = 4, microbatches: int = 8, hosts: Sequence[str] = ("one",), slow: float = 1.0
) -> Trace:
    """Return the trace of a pipeline, including data loading and the optimizer step. Actions of micro-batch 2 take
    `slow` ms, and all other actions take 1 ms."""

    def lists_of(m: int) -> Lists:
        return pipeline_lists(schedule, pp, m)

    found = simulate(lists_of(microbatches), StageCosts(comm=0.1))
    ranks = []
    for rank, timeline in enumerate(found.timeline):
        spans: list[list[Any]] = []
        end = 0
        for action, start, stop in timeline:
            kind = action.kind.value
            args = {"kind": kind, "stage": action.stage, "microbatch": action.microbatch, "iteration": 3}
            longer = slow if action.microbatch == 2 and action.kind in COMPUTE else 1.0
            ready, begin = end, max(end, round(start * MS))
            end = begin + round((stop - start) * longer * MS)
            if action.kind not in COMPUTE:
                ready = begin
            elif ready < begin:
                spans.append(["training thread", "wait for receive pp", "wait", ready, begin, {"axis": "pp"}])
            spans.append(["training thread", str(action), "pipeline", ready, end, args])
        spans.append(["training thread", "step 3", "step", -MS, end + MS, {"iteration": 3}])
        spans.append(["training thread", "data", "step", -MS, -MS // 2, {}])
        spans.append(["training thread", "optimizer", "step", end, end + MS, {}])
        flight = [["training thread", "all-reduce world", "communication", end, end + MS, {"axis": "world"}]]
        facts = {
            "host": hosts[rank * len(hosts) // pp],
            "coords": {"pp": rank},
            "clock": {"offset_us": 0.0, "drift_us": 0.0, "residual_us": 0.0},
            "memory": {"weights": 4000, "gradients": 4000, "optimizer": 8000, "host": 0, "process": 3 * 2**28},
        }
        ranks.append(RankTrace(spans, flight, facts, lambda time: time))
    layout = {"tp": 1, "cp": 1, "dp": 1, "pp": pp, "ep": 1, "expt_tp": 1, "expt_dp": 1}
    other = {"pipelines": [list(range(pp))], "device": "cpu", "iterations": [3, 3], "layout": layout}
    return assemble(ranks, other, lists_of)


def problems(trace: Trace) -> list[str]:
    """Return a list of violations of the trace format. Violations are wrong fields or numbers, slices of a track that
    overlap without being nested, ends without a beginning, and arrows that connect no slices or point back in time."""
    events: list[Event] = trace["traceEvents"]
    if wrong := [each for number, event in enumerate(events) if (each := malformed(number, event))]:
        return wrong
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    pairs: dict[tuple[bool, str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "besf":
            pairs[event["ph"] in "be", event["cat"], str(event["id"])].append(event)
    found = [f"slices of rank {rank}, track {track} overlap" for (rank, track), each in tracks.items() if cross(each)]
    for (_, *key), ends in pairs.items():
        # the sort is stable, so events with equal times stay in the order of the file
        ends.sort(key=lambda event: event["ts"])
        if [event["ph"] for event in ends] not in (["b", "e"], ["s", "f"]):
            found.append(f"{key}: no end behind a beginning")
        for event in ends:
            spans = tracks[event["pid"], event.get("tid", 0)]
            if event["ph"] in "sf" and not any(start <= event["ts"] <= stop for start, stop in spans):
                found.append(f"{key}: {event['ph']} lies in no slice")
    return found


def cross(slices: Sequence[tuple[float, float]]) -> bool:
    """Return True if two slices overlap without being nested."""
    open_until: list[float] = []
    for start, stop in sorted(slices, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1] <= start + TOLERANCE:
            open_until.pop()
        if open_until and stop > open_until[-1] + TOLERANCE:
            return True
        open_until.append(stop)
    return False


TOLERANCE = 2e-3
"""Tolerance in microseconds when sums of rounded times are compared."""
