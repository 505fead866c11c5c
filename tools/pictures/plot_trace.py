"""Draw the pipeline of a traced step as planned and as measured, on one scale, and the phases of each rank's step.

    python tools/pictures/plot_trace.py runs/a/trace/iterations-11-12.json.gz --output step.svg

The plan is that of the trace: the run's action lists, simulated with the median times of the trace itself. Needs
neither a GPU nor torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file of a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    __package__ = "tools.pictures"

from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.simulator import Timed
from megatron.extensions.diagnosis.trace.pipeline_timeline import MeasuredStep, covered, measured_steps
from megatron.extensions.diagnosis.trace.trace_file import PLANNED_TRACK, Trace, read_trace

from ..common import refuse_picture, run_tool
from .svg import Svg, ticks, time_text, write_svg

NAMES = {
    "F": "F: forward",
    "B": "B: backward",
    "I": "I: backward, input gradient",
    "W": "W: backward, weight gradient",
    "FB": "FB: forward and backward in turns",
}
MOST_RANKS = 64
WIDTH, LEFT = 1100.0, 70.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="file that --trace wrote")
    parser.add_argument("--iteration", type=int, help="default: the last traced one")
    parser.add_argument("--rank", type=int, default=0, help="a rank of the pipeline to draw; default: 0")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument("--phases", type=Path, metavar="FILE.svg", help="draw the phases of all ranks' step too")
    args = parser.parse_args(argv)
    refuse_picture("--output", args.output)
    refuse_picture("--phases", args.phases)
    trace = read_trace(args.trace)
    step = chosen(trace, args.iteration, args.rank)
    print(told(trace, step))
    write_svg(timeline_picture(trace, step), args.output)
    if args.phases is not None:
        write_svg(phases_picture(trace, step.iteration), args.phases)
    return 0


def chosen(trace: Trace, iteration: int | None = None, rank: int = 0) -> MeasuredStep:
    """The pipeline of `rank` in an iteration, or the last one. Raises ValueError if it is not in the trace."""
    steps = [step for step in measured_steps(trace) if rank in step.ranks]
    if not steps:
        raise ValueError(f"--rank {rank}: the trace has no whole step of its pipeline")
    iterations = [step.iteration for step in steps]
    if iteration is not None and iteration not in iterations:
        raise ValueError(f"--iteration {iteration}: the trace has {iterations[0]} to {iterations[-1]}")
    return steps[-1] if iteration is None else steps[iterations.index(iteration)]


def planned_timeline(trace: Trace, step: MeasuredStep) -> list[list[Timed]]:
    """The plan of a step by pipeline rank; [] if the trace has none."""
    rows: dict[int, list[Timed]] = {rank: [] for rank in step.ranks}
    for event in trace["traceEvents"]:
        if event.get("cat") == PLANNED_TRACK and event["args"].get("planned_iteration") == step.iteration:
            args = event["args"]
            action = Action(Kind(args["kind"]), args["stage"], args["microbatch"])
            if event["pid"] in rows:
                rows[event["pid"]].append(Timed(action, event["ts"], event["ts"] + event["dur"]))
    return list(rows.values()) if any(rows.values()) else []


def told(trace: Trace, step: MeasuredStep) -> str:
    """Times and bubbles in words."""
    lines = [f"measured: {time_text(step.makespan)}, bubble {step.bubble:.1%}"]
    plan = planned_timeline(trace, step)
    length, bubble = _span_and_bubble(plan) if plan else (0.0, 0.0)
    if length:
        lines.insert(0, f"planned: {time_text(length)}, bubble {bubble:.1%}")
        more = step.makespan / length - 1
        lines.append(f"{abs(more):.1%} {'longer' if more > 0 else 'shorter'} than planned")
    return f"iteration {step.iteration}, pipeline of ranks {', '.join(map(str, step.ranks))}: " + "; ".join(lines)


def _span_and_bubble(timeline: Sequence[Sequence[Timed]]) -> tuple[float, float]:
    start = min(timed.start for row in timeline for timed in row)
    length = max(timed.stop for row in timeline for timed in row) - start
    busy = sum(covered((timed.start, timed.stop) for timed in row) for row in timeline)
    return length, 1 - busy / (len(timeline) * length) if length else 0.0


def timeline_picture(trace: Trace, step: MeasuredStep) -> Svg:
    """The plan above the measurement, on one scale."""
    plan = planned_timeline(trace, step)
    panels = [("planned, with the median times of this trace", plan)] if plan else []
    panels.append((f"measured, iteration {step.iteration}", step.timeline))
    longest = max(_span_and_bubble(timeline)[0] for _, timeline in panels) or 1.0
    row, rows = (22.0 if len(step.ranks) <= 16 else 12.0), len(step.ranks)
    height = 30 + len(panels) * (rows * row + 46) + 24
    picture = Svg(WIDTH, height, f"Pipeline of iteration {step.iteration}, planned and measured", told(trace, step))
    scale, y = (WIDTH - LEFT - 60) / longest, 8.0
    for name, timeline in panels:
        length, bubble = _span_and_bubble(timeline)
        picture.text(4, y + 14, f"{name}: {time_text(length)}, bubble {bubble:.1%}", "strong")
        y += 22
        _draw_rows(picture, timeline, step.ranks, y, row, scale, length)
        y += rows * row
        for value in ticks(0, longest, 8):
            picture.line(LEFT + value * scale, y, LEFT + value * scale, y + 4)
            picture.text(LEFT + value * scale, y + 15, time_text(value) if value else "0", "soft small", "middle")
        y += 24
    kinds = sorted({timed.action.kind.value for _, timeline in panels for line in timeline for timed in line})
    entries = [(f"c-{kind}", NAMES[kind]) for kind in ("F", "B", "I", "W", "FB") if kind in kinds]
    picture.legend(LEFT, height - 8, entries)
    return picture


def _draw_rows(
    picture: Svg,
    timeline: Sequence[Sequence[Timed]],
    ranks: Sequence[int],
    top: float,
    row: float,
    scale: float,
    length: float,
) -> None:
    start = min(timed.start for line in timeline for timed in line)
    for number, (rank, line) in enumerate(zip(ranks, timeline, strict=True)):
        y = top + number * row
        picture.text(LEFT - 6, y + row / 2 + 4, f"rank {rank}", "soft small", "end")
        picture.line(LEFT, y + row - 1, LEFT + length * scale, y + row - 1)
        for action, begin, end in line:
            x, width = LEFT + (begin - start) * scale, (end - begin) * scale
            outline = "bar " if width > 3 else ""
            picture.rect(
                x, y + 1, width, row - 3, f"{outline}c-{action.kind.value}", f"{action}: {time_text(end - begin)}"
            )
            label = str(action.microbatch)
            if width > 6 + 6 * len(label):
                picture.text(x + width / 2, y + row / 2 + 3.5, label, "small on", "middle")
        idle = 1 - covered((timed.start, timed.stop) for timed in line) / length if length else 0.0
        picture.text(LEFT + length * scale + 4, y + row / 2 + 4, f"idle {idle:.0%}", "soft small")


PHASES = {
    "data": "data",
    "optimizer": "optimizer",
    "end of the gradient reduction": "reduction",
}


def phases_picture(trace: Trace, iteration: int) -> Svg:
    """What each rank's step consists of, from its data to its update, on the clock of all ranks."""
    ranks: dict[int, list[tuple[str, str, float, float]]] = {}
    steps: dict[int, tuple[float, float]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event.get("cat") == "step" and event["name"] == f"step {iteration}":
            steps[event["pid"]] = event["ts"], event["ts"] + event["dur"]
    waits: dict[int, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        rank = event.get("pid")
        inside = (
            event["ph"] == "X" and event["tid"] == 0 and rank in steps
        )  # the training thread, on GPUs as it launches
        if not inside or not steps[rank][0] <= event["ts"] <= steps[rank][1]:
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        args = event["args"]
        if event["cat"] == "step" and event["name"] in PHASES:
            ranks.setdefault(rank, []).append((PHASES[event["name"]], event["name"], begin, end))
        elif event["cat"] == "pipeline" and args.get("iteration") == iteration and args["kind"] in NAMES:
            ranks.setdefault(rank, []).append((args["kind"], event["name"], begin, end))
        elif event["cat"] == "wait" and args.get("axis") == "pp":
            waits.setdefault(rank, []).append((begin, end))
    shown = sorted(steps)[:MOST_RANKS]
    first, last = min(start for start, _ in steps.values()), max(stop for _, stop in steps.values())
    row, scale = 16.0, (WIDTH - LEFT - 20) / ((last - first) or 1.0)
    height = 26 + len(shown) * row + 50
    more = f"; the first {MOST_RANKS} of {len(steps)} ranks" if len(steps) > MOST_RANKS else ""
    picture = Svg(WIDTH, height, f"Phases of iteration {iteration} on each rank")
    picture.text(4, 16, f"step {iteration} of every rank: {time_text(last - first)}{more}", "strong")
    for number, rank in enumerate(shown):
        y = 26 + number * row
        picture.text(LEFT - 6, y + 12, f"rank {rank}", "soft small", "end")
        start, stop = steps[rank]
        picture.rect(LEFT + (start - first) * scale, y + 1, (stop - start) * scale, row - 3, "c-other", "other")
        for colour, name, begin, end in ranks.get(rank, []):
            x, width = LEFT + (begin - first) * scale, (end - begin) * scale
            picture.rect(x, y + 1, width, row - 3, f"c-{colour}", f"{name}: {time_text(end - begin)}")
        for begin, end in waits.get(rank, []):
            x, width = LEFT + (begin - first) * scale, (end - begin) * scale
            picture.rect(x, y + 1, width, row - 3, "paper", "waits for a message")
    y = 26 + len(shown) * row
    for value in ticks(0, last - first, 8):
        picture.text(LEFT + value * scale, y + 14, time_text(value) if value else "0", "soft small", "middle")
    used = {colour for line in ranks.values() for colour, *_ in line}
    entries = [(f"c-{kind}", name) for kind, name in NAMES.items() if kind in used]
    entries += [("c-data", "data"), ("c-reduction", "end of the gradient reduction"), ("c-optimizer", "optimizer")]
    picture.legend(4, height - 8, [*entries, ("c-other", "other"), ("paper", "blank: waits")])
    return picture


if __name__ == "__main__":
    run_tool(main)
