"""Draw a pipeline schedule as text and as a picture, with its bubble and peak activations.

    python tools/plot_schedule.py --pipeline-schedule zb-h1 --pp 4 --num-microbatches 8 --output schedule.png

Times are for one microbatch on one stage, in any unit. This tool needs neither a GPU nor torch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, layout_of, runs_in_turns
from megatron.core.pipeline_parallel.walk import TIMED, Timed
from megatron.extensions.plan.simulator.simulator import Simulation, StageCosts, lists_of_steps, simulate
from megatron.training.step_parts import STEP_PARTS

from .common import add_config_flags, add_extension_flag, refuse, refuse_picture, run_tool, too_small, tool_parser
from .pictures.drawing import (
    COLOURS,
    NAMES,
    draw_actions,
    fill_legend,
    idle_shares,
    name_rows,
    new_figure,
    write_picture,
)

INCHES_PER_ACTION, MOST_INCHES = 0.28, 20.0
SMALLEST_INCHES = 0.17
"""Minimum width of an action in inches, for schedules that are too long for the normal width. An action of this width
has room for three small digits."""

LONG_RUN = 50
COSTS: dict[str, tuple[float, str]] = {
    "forward": (1.0, "time of F"),
    "input_grad": (1.0, "time of I"),
    "weight_grad": (1.0, "time of W"),
    "comm": (0.0, "time of a message between two ranks"),
    "exchanges": (0, "number of expert all-to-alls in F, and in B or I"),
    "exchange": (0.0, "time of one expert all-to-all"),
}
"""Default and help text of each field of `StageCosts`, keyed by flag."""

MOST_COLUMNS = 480
"""Maximum number of characters in a printed schedule line. Only the beginning and the end of a longer line are
printed."""


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser(argv).parse_args(argv)
    check(args)
    schedule = args.pipeline_schedule
    pp = args.pp
    chunks = args.num_virtual_stages_per_pipeline_rank
    layout = layout_of(schedule, pp, chunks)
    in_turns = args.overlap_moe_expert_parallel_comm
    if in_turns and not runs_in_turns(schedule, pp, layout.chunks):
        raise ValueError("--overlap-moe-expert-parallel-comm needs --pipeline-schedule interleaved or zb-h2, or --pp 1")
    group = args.microbatch_group_size_per_virtual_pipeline_stage
    build = partial(pipeline_lists, schedule, pp, args.num_microbatches, chunks, group=group, in_turns=in_turns)
    flushes = PIPELINE_SCHEDULES.facts(schedule).flushes
    if not flushes and args.num_microbatches < pp:
        raise ValueError(f"--num-microbatches must be at least --pp {pp} with {schedule}")
    lists = build() if flushes else lists_of_steps(schedule, pp, [args.num_microbatches] * args.steps)
    costs = StageCosts(**{name: getattr(args, name) for name in COSTS}, activation=1 / layout.chunks)
    found = simulate(lists, costs)
    if args.messages:
        for rank, actions in enumerate(lists):
            print(f"rank {rank}: {' '.join(short(action) for action in actions)}")
    names = Names(layout, None if flushes else args.num_microbatches)
    print("\n".join(without_middle(text_of(found, names))))
    step = f"time of a step {found.makespan:g}, bubble {found.bubble:.4f}"
    print(step if flushes else of_run(found, args, costs))
    peaks = ", ".join(f"{peak:g}" for peak in found.peak_activations)
    print(f"peak activations by rank, in microbatches of a rank's whole layers: {peaks}")
    if found.exchanging:
        hidden = 1 - found.exposed / found.exchanging
        print(f"expert all-to-alls overlapped with computation: {hidden:.1%} of their time")
    if any(STEP_PARTS.facts(name).kept is not None for name in STEP_PARTS) and flushes:
        from megatron.extensions.plan.planner.time.pipeline import post_validated

        time, bubble = post_validated(build(validates=True), costs)
        flag = "--optimizer-post-validation"
        print(f"with {flag}, if no gradient is clipped: time of a step {time:g}, bubble {bubble:.4f}")
    if args.output:
        title = f"{schedule}, p = {pp}, m = {args.num_microbatches}, v = {layout.chunks}"
        draw(found, names, f"{title}: bubble {found.bubble:.1%}", args.output)
    return 0


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    add = parser.add_argument
    add("--pipeline-schedule", choices=PIPELINE_SCHEDULES, default="1f1b")
    add("--pipeline-model-parallel-size", "--pp", dest="pp", type=int, default=4, help="pipeline ranks")
    add("--num-microbatches", type=int, default=8)
    add("--steps", type=int, default=3, help="number of steps to draw if the schedule has no flush")
    names = "num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_virtual_pipeline_stage"
    add_config_flags(parser, "stages, as in training", *names)
    for name, (default, text) in COSTS.items():
        add(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text)
    add("--overlap-moe-expert-parallel-comm", action="store_true", help="forward and backward passes run in turns")
    add("--messages", action="store_true", help="print the action list of each rank, with sends and receives")
    add("--output", type=Path, metavar="FILE.png", help="write a picture")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if the value of a flag is out of range. The message lists all such flags."""
    problems = too_small(args, pp=1, num_microbatches=1, steps=1)
    problems += too_small(args, microbatch_group_size_per_virtual_pipeline_stage=args.pp)
    for name in COSTS:
        value, above = getattr(args, name), name in ("forward", "input_grad", "weight_grad")
        if not math.isfinite(value) or value < 0 or (above and not value):
            least = "above 0" if above else "of at least 0"
            problems.append(f"--{name.replace('_', '-')} {value:g}: must be a finite number {least}")
    refuse(problems)
    refuse_picture("--output", args.output)


def short(action: Action) -> str:
    """Format an action as its kind, its stage and its micro-batch, such as F0.3 or SEND_F0.3."""
    return f"{action.kind.value}{action.stage}.{action.microbatch}"


@dataclass(frozen=True)
class Names:
    """Labels and shades of the passes in a drawn schedule."""

    layout: PipelineLayout
    per_step: int | None = None
    """Number of micro-batches in a step if the schedule has no flush; otherwise, None."""

    def label(self, action: Action) -> str:
        """Return the label of an action, such as F3v1. The label consists of the kind and the micro-batch, then a
        letter for the model chunk if ranks have several chunks, and then the weight version if there are several
        versions."""
        layout, version = self.layout, ""
        chunk = chr(ord("a") + layout.chunk_of(action.stage) % 26) if layout.chunks > 1 else ""
        if self.per_step is not None:
            version = f"v{version_of(action.microbatch, self.per_step)}"
        return f"{action.kind.value}{action.microbatch}{chunk}{version}"

    def shade(self, action: Action) -> float:
        """Return the opacity with which an action is drawn. Actions of later model chunks, and of every second weight
        version, are paler."""
        if self.per_step is not None:
            return 1 - 0.5 * (version_of(action.microbatch, self.per_step) % 2)
        return 1 - 0.6 * self.layout.chunk_of(action.stage) / self.layout.chunks

    @property
    def note(self) -> str:
        if self.per_step is not None:
            return "number: micro-batch; paler: every other version of the weights"
        return "number: micro-batch" + ("; paler: later chunk" if self.layout.chunks > 1 else "")


def version_of(microbatch: int, microbatches: int) -> int:
    """Return the version of the weights with which `microbatch` is computed in a schedule without flush. The version is
    the number of earlier optimizer updates. Micro-batches are numbered over all steps. Without flush, the passes of a
    step begin before the optimizer update of the previous step."""
    return max(0, microbatch // microbatches - 1)


def of_run(found: Simulation, args: argparse.Namespace, costs: StageCosts) -> str:
    """Describe the time and bubble of a schedule without flush, for the drawn steps and for a run of `LONG_RUN`
    steps."""
    long = simulate(lists_of_steps(args.pipeline_schedule, args.pp, [args.num_microbatches] * LONG_RUN), costs)
    return (
        f"{args.steps} steps: time {found.makespan:g}, bubble {found.bubble:.4f}\n"
        f"{LONG_RUN} steps: time of a step {long.makespan / LONG_RUN:g}, bubble {long.bubble:.4f}, all of it while "
        "the pipeline fills and empties"
    )


def text_of(found: Simulation, names: Names) -> list[str]:
    """Return one line of text for each rank. Positions in the line are proportional to time, and actions have the
    labels of `Names.label`."""
    timed = [entry for timeline in found.timeline for entry in drawn(timeline)]
    widest = max(len(names.label(entry.action)) for entry in timed)
    scale = (widest + 1) / min(entry.stop - entry.start for entry in timed)
    lines = []
    for rank, timeline in enumerate(found.timeline):
        line = ""
        for action, start, stop in drawn(timeline):
            line = line.ljust(round(start * scale), ".")
            line += names.label(action).ljust(round(stop * scale) - len(line) - 1, "-") + "|"
        lines.append(f"{rank:>3} {line}")
    return lines


def without_middle(lines: Sequence[str]) -> list[str]:
    """Remove the middle of all lines if a schedule is long. The same columns are removed from each line."""
    longest = max(map(len, lines))
    if longest <= MOST_COLUMNS:
        return list(lines)
    half = MOST_COLUMNS // 2
    cut = [f"{line[:half]} ... {line.ljust(longest)[-half:]}".rstrip() for line in lines]
    return [*cut, f"{longest - MOST_COLUMNS} of {longest} columns left out; --messages prints every action"]


def drawn(timeline: Sequence[Timed]) -> list[Timed]:
    """Return the actions of a timeline that take time. Other actions are not drawn. Forward and backward passes that
    alternate are drawn as one action, named after the forward pass."""
    return [entry for entry in timeline if entry.action.kind in TIMED and entry.stop > entry.start]


def draw(found: Simulation, names: Names, title: str, path: Path) -> None:
    """Draw a bar for each compute action, colored by kind, shaded by `names`, and labeled with the microbatch. The
    idle fraction of each rank is shown on the right. If a schedule is long, only its beginning and end are drawn,
    because the middle is repetitive."""
    bars = [(rank, entry) for rank, timeline in enumerate(found.timeline) for entry in drawn(timeline)]
    unit = min(entry.stop - entry.start for _, entry in bars)
    inches = min(INCHES_PER_ACTION, max(SMALLEST_INCHES, MOST_INCHES * unit / found.makespan))
    windows = windows_of(found.makespan, unit * MOST_INCHES / inches)
    width = max(6.0, sum(stop - start for start, stop in windows) / unit * inches)
    points, scale = (7 if inches == INCHES_PER_ACTION else 5), 72 * inches / unit
    pp = len(found.timeline)
    figure = new_figure(width, 1.7 + 0.3 * pp)
    panels = figure.subplots(1, len(windows), sharey=True, squeeze=False)[0]
    for axes, (start, stop) in zip(panels, windows, strict=True):
        for rank, timeline in enumerate(found.timeline):
            line = [entry for entry in drawn(timeline) if entry.start < stop and entry.stop > start]
            draw_actions(axes, rank, line, 0.0, scale, names.shade, points)
        axes.set(xlim=(start, stop), xlabel="time")
    name_rows(panels[0], list(map(str, range(pp))))
    panels[0].set_ylabel("pipeline rank")
    idle_shares(panels[-1], [1 - busy / found.makespan for busy in found.busy])
    left_out = f"; time {windows[0][1]:.0f} to {windows[1][0]:.0f} left out" if len(windows) > 1 else ""
    figure.suptitle(title + left_out)
    kinds = {entry.action.kind.value for _, entry in bars}
    colours = {name: COLOURS[kind] for kind, name in NAMES.items() if kind in kinds}
    fill_legend(figure, colours | {names.note: "none"})
    write_picture(figure, path)


def windows_of(makespan: float, most: float) -> list[tuple[float, float]]:
    """Return the time intervals of a schedule to draw. The intervals cover the whole schedule or, if the schedule is
    longer than `most`, its beginning and its end, with a total length of `most`."""
    if makespan <= most:
        return [(0.0, makespan)]
    return [(0.0, most / 2), (makespan - most / 2, makespan)]


if __name__ == "__main__":
    run_tool(main)
