"""Traces of runs that never were: the slices of simulated pipelines, as ranks would have recorded them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.actions import COMPUTE, Lists
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.extensions.diagnosis.trace.pipeline_timeline import RankTrace, assemble
from megatron.extensions.diagnosis.trace.trace_file import Event, Trace, malformed
from megatron.extensions.simulator.simulator import StageCosts, simulate

MS = 1_000_000


def simulated_trace(
    schedule: str = "zb-h1", pp: int = 4, microbatches: int = 8, hosts: Sequence[str] = ("one",), slow: float = 1.0
) -> Trace:
    """A pipeline whose actions take 1 ms, a step of it with data and optimizer; those of micro-batch 2 take `slow`."""

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
    """What violates the format: fields, numbers, slices of a track that overlap without one lying in the other, ends
    without a beginning, and arrows that begin or end at no slice or point back in time."""
    found: list[str] = []
    tracks: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    pairs: dict[tuple[str, str, str], dict[str, Event]] = {}
    for number, event in enumerate(trace["traceEvents"]):
        phase = event.get("ph")
        if wrong := malformed(number, event):
            found.append(wrong)
        elif phase == "X":
            end = event["ts"] + event["dur"]
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -end, event["name"]))
        elif phase in "besf":
            kind = "async" if phase in "be" else "flow"
            key = (kind, event["cat"], str(event["id"]))
            if phase in pairs.setdefault(key, {}):
                found.append(f"event {number} ({event['name']}): a second {phase} of {key}")
            pairs[key][phase] = event
    for place, slices in tracks.items():
        found += _overlaps(place, slices)
    for key, ends in pairs.items():
        first, last = ("b", "e") if key[0] == "async" else ("s", "f")
        if ends.keys() != {first, last}:
            found.append(f"{key} has only {', '.join(ends)}")
        elif ends[last]["ts"] < ends[first]["ts"]:
            found.append(f"{key} ends before it begins")
        elif key[0] == "flow":
            for event in ends.values():
                spans = tracks.get((event["pid"], event["tid"]), [])
                if not any(start <= event["ts"] <= -end for start, end, _ in spans):
                    found.append(f"{key}: {event['ph']} lies in no slice")
    return found


def _overlaps(place: tuple[int, int], slices: list[tuple[float, float, str]]) -> Iterator[str]:
    open_slices: list[tuple[float, str]] = []
    for start, negative_end, name in sorted(slices):
        while open_slices and open_slices[-1][0] <= start + TOLERANCE:
            open_slices.pop()
        if open_slices and -negative_end > open_slices[-1][0] + TOLERANCE:
            yield f"rank {place[0]}, track {place[1]}: {name} begins in {open_slices[-1][1]} and ends after it"
        open_slices.append((-negative_end, name))


TOLERANCE = 2e-3
"""Microseconds: sums of rounded numbers."""
