"""Memory of each rank by category, as planned and as a traced run held it.

    python pretrain_gpt.py --dry-run --json plan.json FLAGS
    python tools/pictures/plot_memory.py --plan plan.json --trace iterations-11-12.json.gz --output memory.svg

The plan is by pipeline rank. A trace has what each of its ranks held: tensors by category, the rest at the highest
point of the device, and on CPU the whole process, which is not comparable with a plan. Needs neither a GPU nor torch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file of a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    __package__ = "tools.pictures"

from megatron.extensions.diagnosis.trace.trace_file import read_trace

from ..common import refuse_picture, run_tool
from .svg import Svg, byte_text, ticks, write_svg

CATEGORIES = {
    "weights": "h-0",
    "gradients": "h-1",
    "optimizer": "h-2",
    "activations": "h-3",
    "working": "h-4",
    "activations and working": "h-3",
    "host": "h-5",
}
"""Category -> class of its colour. The last is of host memory, beside the device's."""

MOST_RANKS = 32


@dataclass(frozen=True)
class Bar:
    """What one rank, or all ranks of a pipeline stage, plan or hold."""

    label: str
    planned: bool
    sizes: Mapping[str, int]
    note: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, help="file of --dry-run --json")
    parser.add_argument("--trace", type=Path, help="file of --trace")
    parser.add_argument("--output", type=Path, metavar="FILE.svg", help="draw the bars")
    args = parser.parse_args(argv)
    if args.plan is None and args.trace is None:
        parser.error("name a --plan, a --trace, or both")
    refuse_picture("--output", args.output)
    bars = []
    if args.plan is not None:
        bars += planned_bars(read_plan(args.plan))
    if args.trace is not None:
        bars += measured_bars(read_trace(args.trace)["otherData"]["ranks"])
    print("\n".join(f"{bar.label}: {told(bar)}" for bar in in_order(bars)))
    if args.output is not None:
        write_svg(memory_picture(bars), args.output)
    return 0


def read_plan(path: Path) -> list[dict[str, int]]:
    """The memory of each pipeline rank of a dry run. Raises ValueError if the file is not one's."""
    try:
        memory = json.loads(path.read_text(encoding="utf-8"))["memory"]
        return [{"pp_rank": int(rank["pp_rank"])} | {name: int(size) for name, size in rank.items()} for rank in memory]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--plan {path} is not a plan ({error}); --dry-run --json FILE writes one") from error


def planned_bars(memory: Sequence[Mapping[str, int]]) -> list[Bar]:
    """One for each pipeline rank."""
    return [
        Bar(f"pp {rank['pp_rank']}", True, {name: rank[name] for name in CATEGORIES if rank.get(name)})
        for rank in memory
    ]


def measured_bars(ranks: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """One for each rank that has recorded its memory."""
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
    """The plan of a pipeline rank before what its ranks held."""
    return sorted(bars, key=lambda bar: (int(bar.label.split(",")[0].split()[1]), not bar.planned))


def told(bar: Bar) -> str:
    """A bar in words."""
    parts = ", ".join(f"{name} {byte_text(size)}" for name, size in bar.sizes.items())
    on_device = sum(size for name, size in bar.sizes.items() if name != "host")
    return f"{'planned' if bar.planned else 'held'} {byte_text(on_device)}: {parts}{bar.note}"


def memory_picture(bars: Sequence[Bar]) -> Svg:
    """One horizontal bar each, by category, plan and measurement of a pipeline rank beside each other."""
    every = in_order(bars)
    drawn = every[:MOST_RANKS]
    more = f"; {len(drawn)} of {len(every)} bars are drawn" if len(every) > len(drawn) else ""
    left, row, width = 150.0, 22.0, 900.0
    longest = max((sum(bar.sizes.values()) for bar in drawn), default=0) or 1
    scale = (width - left - 190) / longest
    height = 30 + row * len(drawn) + 60
    picture = Svg(width, height, "Memory of ranks, planned and held", "; ".join(map(told, drawn[:8])))
    picture.text(4, 16, f"memory by category, planned and held{more}", "strong")
    for number, bar in enumerate(drawn):
        x, y = left, 28 + number * row
        what = "planned" if bar.planned else "held"
        picture.text(left - 6, y + 14, f"{bar.label} {what}", "soft small", "end")
        for name, size in bar.sizes.items():
            look = f"bar {CATEGORIES[name]}"
            picture.rect(x, y + 2, size * scale, row - 5, look, f"{bar.label} {what}: {name} {byte_text(size)}")
            x += size * scale
        on_device = sum(size for name, size in bar.sizes.items() if name != "host")
        picture.text(x + 6, y + 14, f"{byte_text(on_device)}{bar.note}", "small")
    y = 28 + row * len(drawn)
    unit = 1024 ** int(math.log(longest, 1024))
    for value in (unit * number for number in ticks(0, longest / unit, 6)):
        picture.text(left + value * scale, y + 14, byte_text(value) if value else "0", "soft small", "middle")
    used = [name for name in CATEGORIES if any(name in bar.sizes for bar in drawn)]
    picture.legend(left, height - 10, [(CATEGORIES[name], name) for name in used])
    return picture


if __name__ == "__main__":
    run_tool(main)
