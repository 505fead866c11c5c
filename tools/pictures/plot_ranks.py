"""Map of ranks to nodes: the coordinates of each rank, the node it is on, and which groups cross nodes.

    python tools/pictures/plot_ranks.py --world-size 64 --gpus-per-node 8 --tp 8 --pp 4 --output ranks.svg
    python tools/pictures/plot_ranks.py --trace runs/a/trace/iterations-11-12.json.gz

By flags, the ranks of a node follow each other, as torchrun and srun number them. From a trace, the hosts are those of
the run. Needs neither a GPU nor torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

if not __package__:  # run as a file of a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    __package__ = "tools.pictures"

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.diagnosis.trace.trace_file import read_trace

from ..common import add_config_flags, config_of, refuse_picture, run_tool
from .svg import Svg, write_svg

FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_tp_pp_dp_mapping",
)
AXES = {"tp": "TP", "cp": "CP", "ep": "EP", "dp": "DP", "pp": "PP", "expt_dp": "expert DP"}
MOST_NODES = 128
"""Nodes that are drawn or listed."""


@dataclass(frozen=True)
class RankMap:
    """A layout and the node of each rank."""

    dims: ParallelDims
    nodes: Sequence[str]
    """By rank."""

    @property
    def ranks_of(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return found

    @property
    def axes(self) -> list[str]:
        """Axes along which the model or the data are cut."""
        expert = self.dims.ep > 1
        return [axis for axis in AXES if self.dims.size(axis) > 1 and (axis != "expt_dp" or expert)]

    def nodes_of(self, group: Sequence[int]) -> int:
        return len({self.nodes[rank] for rank in group})

    def crossing(self, axis: str) -> tuple[int, int, int]:
        """(groups along an axis, those whose ranks are on several nodes, the most nodes of one)."""
        spans = [self.nodes_of(group) for group in self.dims.groups(axis)]
        return len(spans), sum(span > 1 for span in spans), max(spans)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, help="ranks")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="ranks of a node (default: 8)")
    add_config_flags(parser, "layout", *FIELDS)
    parser.add_argument("--trace", type=Path, help="layout and hosts of a traced run instead")
    parser.add_argument("--output", type=Path, metavar="FILE.svg", help="draw the map")
    args = parser.parse_args(argv)
    refuse_picture("--output", args.output)
    if args.trace is not None:
        found = map_of_trace(read_trace(args.trace))
    elif args.world_size is None or min(args.world_size, args.gpus_per_node) < 1:
        parser.error("--world-size and --gpus-per-node must be at least 1, or name a --trace")
    else:
        found = planned_map(config_of(ModelParallelConfig, args), args.world_size, args.gpus_per_node)
    print("\n".join(lines(found)))
    if args.output is not None:
        write_svg(rank_picture(found), args.output)
    return 0


def planned_map(config: ModelParallelConfig, world_size: int, gpus_per_node: int) -> RankMap:
    """Consecutive ranks on a node. Raises ValueError if the layout does not fit the ranks."""
    nodes = [f"node {rank // gpus_per_node}" for rank in range(world_size)]
    return RankMap(ParallelDims.from_config(config, world_size), nodes)


def map_of_trace(trace: dict[str, Any]) -> RankMap:
    """The layout and the hosts of a traced run."""
    other = trace["otherData"]
    sizes = {axis: other["layout"][axis] for axis in ("tp", "pp", "cp", "dp", "ep", "expt_tp")}
    ranks = [facts["host"] for facts in other["ranks"]]
    return RankMap(ParallelDims(**sizes, tp_pp_dp=other.get("tp_pp_dp", False)), ranks)


def lines(found: RankMap) -> Iterator[str]:
    """The map as text: nodes and the coordinates of their ranks, then groups and what crosses nodes."""
    shown = [axis for axis in ("tp", "cp", "ep", "dp", "pp") if axis in found.axes]
    nodes = found.ranks_of
    yield f"{_count(found)}: " + ", ".join(
        f"{AXES[axis]} {found.dims.size(axis)}" for axis in ("tp", "cp", "ep", "dp", "pp")
    )
    for number, (node, ranks) in enumerate(nodes.items()):
        if number == MOST_NODES:
            yield f"... and {len(nodes) - MOST_NODES} more nodes"
            break
        coords = [found.dims.coords(rank) for rank in ranks]
        where = ", ".join(f"{axis} {_span([at[axis] for at in coords])}" for axis in shown)
        yield f"{node:<12} ranks {_span(ranks):<12} {where}".rstrip()
    for axis in found.axes:
        yield crossing_line(found, axis)


def crossing_line(found: RankMap, axis: str) -> str:
    """Whether the groups along an axis stay within nodes."""
    groups, crossing, most = found.crossing(axis)
    size = found.dims.size(axis)
    many = f"{groups} groups of {size}" if groups > 1 else f"1 group of {size}"
    if not crossing:
        return f"{AXES[axis]}: {many}, within nodes"
    who = "all cross" if crossing == groups and groups > 1 else f"{crossing} cross" if groups > 1 else "crosses"
    example = next(group for group in found.dims.groups(axis) if found.nodes_of(group) > 1)
    return f"{AXES[axis]}: {many}, {who} nodes, up to {most} nodes each; such as ranks {_span(example)}"


def _count(found: RankMap) -> str:
    nodes = len(found.ranks_of)
    return f"{len(found.nodes)} ranks on {nodes} node{'s' if nodes > 1 else ''}"


def _span(numbers: Sequence[int]) -> str:
    """`0-7`, `0-12 by 4`, or the numbers themselves."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return str(distinct[0])
    steps = {after - before for before, after in pairwise(distinct)}
    if len(steps) == 1 and len(distinct) > 2:
        step = steps.pop()
        return f"{distinct[0]}-{distinct[-1]}" + (f" by {step}" if step > 1 else "")
    return ",".join(map(str, distinct[:8])) + (",..." if len(distinct) > 8 else "")


HUES = 8


def rank_picture(found: RankMap) -> Svg:
    """A box for each node with a cell for each rank: coloured by pipeline rank, with its coordinates; a red frame where
    tensor-parallel ranks are on several nodes."""
    nodes = list(found.ranks_of.items())
    drawn, most = nodes[:MOST_NODES], max(len(ranks) for _, ranks in nodes)
    detailed = len(drawn) <= 16
    cell, high = (86.0, 46.0) if detailed else (26.0, 20.0)
    in_row = min(most, 8)
    box_width, box_height = in_row * cell + 16, -(-most // in_row) * high + 30
    columns = max(1, min(len(drawn), int(1100 // (box_width + 12))))
    width = max(560.0, columns * (box_width + 12) + 12)
    notes = [crossing_line(found, axis) for axis in found.axes]
    top = 30.0 + 17 * len(notes)
    height = top + -(-len(drawn) // columns) * (box_height + 12) + 34
    picture = Svg(width, height, "Ranks on nodes", "; ".join(notes))
    more = f"; the first {MOST_NODES} are drawn" if len(nodes) > MOST_NODES else ""
    picture.text(12, 18, f"{_count(found)}{more}", "strong")
    for number, note in enumerate(notes):
        picture.text(12, 36 + 17 * number, note, "soft")
    split = {rank for group in found.dims.groups("tp") if found.nodes_of(group) > 1 for rank in group}
    for number, (node, ranks) in enumerate(drawn):
        x = 12 + number % columns * (box_width + 12)
        y = top + number // columns * (box_height + 12)
        picture.rect(x, y, box_width, box_height, "paper")
        for x1, y1, x2, y2 in ((0, 0, 1, 0), (1, 0, 1, 1), (1, 1, 0, 1), (0, 1, 0, 0)):
            picture.line(x + x1 * box_width, y + y1 * box_height, x + x2 * box_width, y + y2 * box_height)
        picture.text(x + 8, y + 16, node[: int(box_width / 8)])
        for place, rank in enumerate(ranks):
            at = x + 8 + place % in_row * cell, y + 24 + place // in_row * high
            _draw_rank(picture, found, rank, at, (cell - 3, high - 3), detailed, rank in split)
    picture.text(12, height - 10, "colour: pipeline rank" + ("; red frame: TP crosses nodes" if split else ""), "soft")
    return picture


def _draw_rank(
    picture: Svg,
    found: RankMap,
    rank: int,
    at: tuple[float, float],
    size: tuple[float, float],
    detailed: bool,
    split: bool,
) -> None:
    coords = found.dims.coords(rank)
    axes = [axis for axis in ("pp", "dp", "ep", "cp", "tp") if found.dims.size(axis) > 1]
    where = " ".join(f"{axis}{coords[axis]}" for axis in axes)
    (x, y), (width, height) = at, size
    picture.rect(x, y, width, height, f"bar h-{coords['pp'] % HUES}", f"rank {rank}: {where}")
    if split:
        picture.rect(x + 1, y + 1, width - 2, height - 2, "crossing")
    if not detailed:
        picture.text(x + width / 2, y + height / 2 + 4, str(rank), "small on", "middle")
        return
    picture.text(x + 6, y + 15, f"rank {rank}", "on strong")
    half = -(-len(axes) // 2) if len(where) > 14 else len(axes)
    for line, part in enumerate((axes[:half], axes[half:])):
        picture.text(x + 6, y + 27 + 11 * line, " ".join(f"{axis}{coords[axis]}" for axis in part), "on small")


if __name__ == "__main__":
    run_tool(main)
