"""Draw the pipeline of a traced step as planned and as measured, on the same scale, and the phases of the step on each
rank.

    python tools/pictures/plot_trace.py runs/a/trace/iterations-11-12.json.gz --output step.svg

The plan consists of the run's action lists, simulated with the trace's median times. The tool needs neither a GPU nor
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    __package__ = "tools.pictures"

from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.walk import Timed
from megatron.extensions.observe.diagnosis.trace.pipeline_timeline import MeasuredStep, covered, measured_steps
from megatron.extensions.observe.diagnosis.trace.trace_file import PLANNED_TRACK, Event, Trace, read_trace

from ..common import refuse_picture, run_tool, tool_parser
from .drawing import (
    COLOURS,
    NAMES,
    NARROW,
    WIDE,
    draw_actions,
    fill_legend,
    idle_shares,
    name_rows,
    new_figure,
    time_text,
    wrapped,
    write_picture,
    write_values,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 64


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("trace", type=Path, help="file that --trace wrote")
    parser.add_argument("--iteration", type=int, help="iteration (default: the last traced one)")
    parser.add_argument("--rank", type=int, default=0, help="a rank of the pipeline to draw (default: 0)")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.svg", help="file for the picture: SVG, PNG or PDF"
    )
    parser.add_argument("--phases", type=Path, metavar="FILE.svg", help="also draw the phases of all ranks' steps")
    args = parser.parse_args(argv)
    refuse_picture("--output", args.output)
    refuse_picture("--phases", args.phases)
    trace = read_trace(args.trace)
    step = chosen(trace, args.iteration, args.rank)
    print(told(trace, step))
    write_picture(timeline_picture(trace, step), args.output)
    if args.phases is not None:
        write_picture(phases_picture(trace, step.iteration), args.phases)
    return 0


def chosen(trace: Trace, iteration: int | None = None, rank: int = 0) -> MeasuredStep:
    """Return the measured pipeline of `rank` in the given iteration, or in the last traced iteration if none is given.
    Raises ValueError if the trace does not contain that pipeline."""
    steps = [step for step in measured_steps(trace) if rank in step.ranks]
    if not steps:
        raise ValueError(f"--rank {rank}: the trace contains no complete step of this rank's pipeline")
    iterations = [step.iteration for step in steps]
    if iteration is not None and iteration not in iterations:
        raise ValueError(f"--iteration {iteration}: the trace has {iterations[0]} to {iterations[-1]}")
    return steps[-1] if iteration is None else steps[iterations.index(iteration)]


def planned_step(trace: Trace, step: MeasuredStep) -> MeasuredStep | None:
    """Return the planned timeline of a step, or None if the trace does not contain it."""
    rows: dict[int, list[Timed]] = {rank: [] for rank in step.ranks}
    for event in trace["traceEvents"]:
        if event.get("cat") == PLANNED_TRACK and event["args"].get("planned_iteration") == step.iteration:
            args = event["args"]
            action = Action(Kind(args["kind"]), args["stage"], args["microbatch"])
            if event["pid"] in rows:
                rows[event["pid"]].append(Timed(action, event["ts"], event["ts"] + event["dur"]))
    return replace(step, timeline=list(rows.values())) if any(rows.values()) else None


def told(trace: Trace, step: MeasuredStep) -> str:
    """Return a sentence with the planned and the measured time and bubble of a step."""
    lines = [f"measured: {time_text(step.makespan)}, bubble {step.bubble:.1%}"]
    plan = planned_step(trace, step)
    if plan is not None and plan.makespan:
        lines.insert(0, f"planned: {time_text(plan.makespan)}, bubble {plan.bubble:.1%}")
        more = step.makespan / plan.makespan - 1
        lines.append(f"{abs(more):.1%} {'longer' if more > 0 else 'shorter'} than planned")
    return f"iteration {step.iteration}, pipeline of ranks {', '.join(map(str, step.ranks))}: " + "; ".join(lines)


def timeline_picture(trace: Trace, step: MeasuredStep, width: float = WIDE) -> Figure:
    """Draw the planned timeline of a step above the measured timeline, on the same time scale."""
    plan = planned_step(trace, step)
    panels = [("planned, with the median times of this trace", plan)] if plan is not None else []
    panels.append((f"measured, iteration {step.iteration}", step))
    longest = max(each.makespan for _, each in panels) or 1.0
    row = 0.3 if len(step.ranks) <= 16 else 0.17
    below = 0.5 if width > NARROW else 1.0
    figure = new_figure(width, below + len(panels) * (row * len(step.ranks) + below / 2 + 0.35))
    for axes, (name, each) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for number, line in enumerate(each.timeline):
            draw_actions(axes, number, line, each.start, 72 * (width - 1.4) / longest)
        busy = [covered((timed.start, timed.stop) for timed in line) for line in each.timeline]
        name_rows(axes, [f"rank {rank}" for rank in step.ranks])
        idle_shares(axes, [1 - time / each.makespan if each.makespan else 0.0 for time in busy])
        axes.set_title(wrapped(f"{name}: {time_text(each.makespan)}, bubble {each.bubble:.1%}", width))
        axes.set_xlim(0, longest)
        write_values(axes.xaxis, time_text, 6 if width > NARROW else 3)
    kinds = {timed.action.kind.value for _, each in panels for line in each.timeline for timed in line}
    fill_legend(figure, {name: COLOURS[kind] for kind, name in NAMES.items() if kind in kinds})
    return figure


PHASES = {
    "data": "data",
    "optimizer": "optimizer",
    "end of the gradient reduction": "reduction",
}


def phase_of(event: Event, iteration: int) -> str | None:
    """Return the name of the phase to which an event belongs. The phase determines the color of the event. Return None
    for events that are not drawn."""
    category, args = event["cat"], event["args"]
    if category == "step":
        return PHASES.get(event["name"])
    if category == "pipeline" and args.get("iteration") == iteration and args["kind"] in NAMES:
        return str(args["kind"])
    return "wait" if category == "wait" and args.get("axis") == "pp" else None


def phases_picture(trace: Trace, iteration: int, width: float = WIDE) -> Figure:
    """Draw the phases of a step, from reading data to the optimizer update, in one row per rank on a common time
    axis."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps: dict[int, tuple[float, float]] = {}
    for event in events:
        if event.get("cat") == "step" and event["name"] == f"step {iteration}":
            steps[event["pid"]] = event["ts"], event["ts"] + event["dur"]
    parts: dict[int, list[tuple[str, float, float]]] = {rank: [("other", *step)] for rank, step in steps.items()}
    for event in events:
        rank, begin = event.get("pid"), event["ts"]
        # Thread 0 is the training thread. On GPUs, the events of this thread show when work is launched.
        inside = event["tid"] == 0 and rank in steps and steps[rank][0] <= begin <= steps[rank][1]
        if inside and (kind := phase_of(event, iteration)):
            parts[rank].append((kind, begin, begin + event["dur"]))
    shown = sorted(steps)[:MOST_RANKS]
    first, last = min(start for start, _ in steps.values()), max(stop for _, stop in steps.values())
    more = f"; the first {MOST_RANKS} of {len(steps)} ranks" if len(steps) > MOST_RANKS else ""
    figure = new_figure(width, (1.1 if width > NARROW else 2.0) + 0.22 * len(shown))
    axes = figure.subplots()
    used = {kind for line in parts.values() for kind, *_ in line}
    legend = {name: COLOURS[kind] for kind, name in NAMES.items() if kind in used}
    legend |= {name: COLOURS[kind] for name, kind in PHASES.items()}
    legend |= {"other": COLOURS["other"], "blank: waits": "white"}
    for number, rank in enumerate(shown):
        line = sorted(parts[rank], key=lambda part: part[0] == "wait")  # drawn last
        times = [(begin - first, end - begin) for _, begin, end in line]
        fills = [COLOURS.get(kind, "white") for kind, *_ in line]
        axes.broken_barh(times, (number - 0.4, 0.8), facecolors=fills)
    name_rows(axes, [f"rank {rank}" for rank in shown])
    axes.set_title(wrapped(f"step {iteration} of every rank: {time_text(last - first)}{more}", width))
    axes.set_xlim(0, last - first or 1.0)
    write_values(axes.xaxis, time_text, 6 if width > NARROW else 3)
    fill_legend(figure, legend)
    return figure


if __name__ == "__main__":
    run_tool(main)
