"""Draw the memory of each rank by category, as planned and as measured in a traced run.

    python pretrain_gpt.py --dry-run --json plan.json FLAGS
    python tools/pictures/plot_memory.py --plan plan.json --trace iterations-11-12.json.gz --output memory.svg

The plan shows the memory of each pipeline rank. For each rank, a trace records the memory at the device's peak: the
memory of tensors by category, and all other memory. On CPU, a trace also records the memory of the whole process, which
is not comparable with a plan. The tool needs neither a GPU nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    __package__ = "tools.pictures"

from megatron.core.config.json_text import parse_json
from megatron.extensions.observe.diagnosis.trace.trace_file import read_trace
from megatron.training.config.batch_size import byte_text

from ..common import refuse_picture, run_tool, tool_parser
from .drawing import HUES, NARROW, WIDE, fill_legend, name_rows, new_figure, wrapped, write_picture, write_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CATEGORIES = {
    "weights": HUES[0],
    "gradients": HUES[1],
    "optimizer": HUES[2],
    "activations": HUES[3],
    "working": HUES[4],
    "activations and working": HUES[3],
    "host": HUES[5],
}
"""Color of each memory category. The last category is host memory, which is drawn after the device memory of a bar."""

MOST_RANKS = 32


@dataclass(frozen=True)
class Bar:
    """Bar that shows planned or measured memory of a rank. One bar can represent all ranks of a pipeline stage."""

    label: str
    planned: bool
    sizes: Mapping[str, int]
    note: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--plan", type=Path, help="file of --dry-run --json")
    parser.add_argument("--trace", type=Path, help="file of --trace")
    parser.add_argument("--output", type=Path, metavar="FILE.svg", help="file for the bars: SVG, PNG or PDF")
    args = parser.parse_args(argv)
    if args.plan is None and args.trace is None:
        parser.error("give --plan, --trace, or both")
    refuse_picture("--output", args.output)
    bars = []
    if args.plan is not None:
        bars += planned_bars(read_plan(args.plan))
    if args.trace is not None:
        bars += measured_bars(read_trace(args.trace)["otherData"]["ranks"])
    print("\n".join(f"{bar.label}: {told(bar)}" for bar in in_order(bars)))
    if args.output is not None:
        write_picture(memory_picture(bars), args.output)
    return 0


def read_plan(path: Path) -> list[dict[str, int]]:
    """Return the memory of each pipeline rank in a dry run's plan. Raises ValueError if the file is not a dry run's
    plan."""
    try:
        plan = parse_json(path.read_text(encoding="utf-8"))
        refused = "; ".join(problem["text"] for problem in plan.get("problems", ())) if "memory" not in plan else ""
        memory = [] if refused else plan["memory"]
        ranks = [
            {"pp_rank": int(rank["pp_rank"])} | {name: int(size) for name, size in rank.items()} for rank in memory
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--plan {path} is not a plan ({error}); --dry-run --json FILE writes one") from error
    if refused:
        raise ValueError(f"--plan {path}: the dry run refused the flags ({refused}); correct them and write a new plan")
    return ranks


def planned_bars(memory: Sequence[Mapping[str, int]]) -> list[Bar]:
    """Return one bar per pipeline rank."""
    return [
        Bar(f"pp {rank['pp_rank']}", True, {name: rank[name] for name in CATEGORIES if rank.get(name)})
        for rank in memory
    ]


def measured_bars(ranks: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Return one bar for each rank that has recorded memory."""
    bars = []
    for number, facts in enumerate(ranks):
        memory = facts.get("memory") or {}
        if not memory:
            continue
        process = f"; the process {byte_text(memory['process'])}" if "process" in memory else ""
        label = f"pp {facts.get('coords', {}).get('pp', 0)}, rank {number}"
        sizes = {name: memory[name] for name in CATEGORIES if memory.get(name)}
        bars.append(Bar(label, False, sizes, process))
    return bars


def in_order(bars: Sequence[Bar]) -> list[Bar]:
    """Sort the bars by pipeline rank. The bar of planned memory precedes the bars of measured memory."""
    return sorted(bars, key=lambda bar: (int(bar.label.split(",")[0].split()[1]), not bar.planned))


def told(bar: Bar) -> str:
    """Return a line of text with the total memory of a bar and the memory of each category."""
    parts = ", ".join(f"{name} {byte_text(size)}" for name, size in bar.sizes.items())
    return f"{'planned' if bar.planned else 'held'} {byte_text(on_device(bar))}: {parts}{bar.note}"


def on_device(bar: Bar) -> int:
    """Return the bytes of all categories except host memory."""
    return sum(size for name, size in bar.sizes.items() if name != "host")


def memory_picture(bars: Sequence[Bar], width: float = WIDE) -> Figure:
    """Draw horizontal bars, each divided into memory categories. Each pipeline rank's measured bar is drawn next to its
    planned bar. A narrow picture shows the sizes below the names."""
    every = in_order(bars)
    drawn = every[:MOST_RANKS]
    more = f"; {len(drawn)} of {len(every)} bars are drawn" if len(every) > len(drawn) else ""
    used = {name: colour for name, colour in CATEGORIES.items() if any(name in bar.sizes for bar in drawn)}
    narrow = width <= NARROW
    figure = new_figure(width, (1.9 + 0.55 * len(drawn)) if narrow else (1.3 + 0.26 * len(drawn)))
    axes = figure.subplots()
    for number, bar in enumerate(drawn):
        begin = 0
        for name, size in bar.sizes.items():
            axes.barh(number, size, left=begin, height=0.8, color=CATEGORIES[name], edgecolor="white", linewidth=0.5)
            begin += size
        if not narrow:
            axes.annotate(f"{byte_text(on_device(bar))}{bar.note}", (begin, number), (4, 0), **BESIDE)
    names = [f"{bar.label} {'planned' if bar.planned else 'held'}" for bar in drawn]
    if narrow:
        sizes = [byte_text(on_device(bar)) for bar in drawn]
        names = ["\n".join([*name.split(", "), size]) for name, size in zip(names, sizes, strict=True)]
    name_rows(axes, names)
    axes.set_title(wrapped(f"memory by category, planned and held{more}", width))
    axes.set_xlim(left=0)
    write_values(axes.xaxis, byte_text, 3 if narrow else 6)
    fill_legend(figure, used)
    return figure


BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "annotation_clip": False}
"""Matplotlib settings for text that is placed to the right of a point."""


if __name__ == "__main__":
    run_tool(main)
