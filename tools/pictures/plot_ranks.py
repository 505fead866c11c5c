"""Draw a map of ranks and nodes. The map shows the parallel coordinates and the node of each rank, and the groups that
span several nodes.

    python tools/pictures/plot_ranks.py --world-size 64 --gpus-per-node 8 --tp 8 --pp 4 --output ranks.svg
    python tools/pictures/plot_ranks.py --trace runs/a/trace/iterations-11-12.json.gz

With flags, the ranks of a node are consecutive, as torchrun and srun number them. With a trace, the hosts are those of
the traced run. The tool needs neither a GPU nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    __package__ = "tools.pictures"

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.observe.diagnosis.trace.trace_file import read_trace

from ..common import add_config_flags, config_of, refuse_picture, run_tool, tool_parser
from .drawing import HUES, new_figure, wrapped, write_picture
from .run_folder import LAYOUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {"tp": "TP", "cp": "CP", "ep": "EP", "dp": "DP", "pp": "PP", "expt_dp": "expert DP"}
MOST_NODES = 128
"""Maximum number of nodes to draw or list."""


@dataclass(frozen=True)
class RankMap:
    """Parallel layout of a run, and the node on which each rank runs."""

    dims: ParallelDims
    nodes: Sequence[str]
    """Name of the node of each rank, indexed by rank."""

    @property
    def ranks_of(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return found

    @property
    def axes(self) -> list[str]:
        """Names of the parallel axes that are larger than 1."""
        expert = self.dims.ep > 1
        return [axis for axis in AXES if self.dims.size(axis) > 1 and (axis != "expt_dp" or expert)]

    def nodes_of(self, group: Sequence[int]) -> int:
        return len({self.nodes[rank] for rank in group})

    def crossing(self, axis: str) -> tuple[int, int, int]:
        """Return three numbers for the groups along an axis: the number of groups, the number of groups that span
        several nodes, and the largest number of nodes that a group spans."""
        spans = [self.nodes_of(group) for group in self.dims.groups(axis)]
        return len(spans), sum(span > 1 for span in spans), max(spans)


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--world-size", type=int, help="ranks")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="ranks per node (default: 8)")
    add_config_flags(parser, "layout", *LAYOUT)
    parser.add_argument("--trace", type=Path, help="use the layout and hosts of a traced run instead")
    parser.add_argument("--output", type=Path, metavar="FILE.svg", help="file for the map: SVG, PNG or PDF")
    args = parser.parse_args(argv)
    refuse_picture("--output", args.output)
    if args.trace is not None:
        found = map_of_trace(read_trace(args.trace))
    elif args.world_size is None or min(args.world_size, args.gpus_per_node) < 1:
        parser.error("--world-size and --gpus-per-node must be at least 1; set them, or use --trace")
    else:
        dims = ParallelDims.from_config(config_of(ModelParallelConfig, args), args.world_size)
        found = planned_map(dims, args.gpus_per_node)
    print("\n".join(lines(found)))
    if args.output is not None:
        write_picture(rank_picture(found), args.output)
    return 0


def planned_map(dims: ParallelDims, gpus_per_node: int) -> RankMap:
    """Return a map with consecutive ranks on each node."""
    return RankMap(dims, [f"node {rank // gpus_per_node}" for rank in range(dims.world_size)])


def map_of_trace(trace: dict[str, Any]) -> RankMap:
    """Return the rank map of a traced run: its layout, and the host of each rank."""
    other = trace["otherData"]
    sizes = {axis: other["layout"][axis] for axis in ("tp", "pp", "cp", "dp", "ep", "expt_tp")}
    ranks = [facts["host"] for facts in other["ranks"]]
    return RankMap(ParallelDims(**sizes, tp_pp_dp=other.get("tp_pp_dp", False)), ranks)


def lines(found: RankMap) -> Iterator[str]:
    """Yield the map as lines of text. First, each node is listed with the coordinates of its ranks. Then, each axis is
    listed with the number of its groups that span several nodes."""
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
    """Return a line with the number of groups along an axis that cross nodes."""
    groups, crossing, most = found.crossing(axis)
    size = found.dims.size(axis)
    many = f"{groups} groups of {size}" if groups > 1 else f"1 group of {size}"
    if not crossing:
        return f"{AXES[axis]}: {many}, within nodes"
    who = "all cross" if crossing == groups and groups > 1 else f"{crossing} cross" if groups > 1 else "crosses"
    example = next(group for group in found.dims.groups(axis) if found.nodes_of(group) > 1)
    return f"{AXES[axis]}: {many}, {who} nodes, up to {most} nodes each; for example, ranks {_span(example)}"


def _count(found: RankMap) -> str:
    nodes = len(found.ranks_of)
    return f"{len(found.nodes)} rank{'s' if len(found.nodes) > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"


def _span(numbers: Sequence[int]) -> str:
    """Format numbers as a range (`0-7`), a range with a step (`0-12 by 4`), or a list."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return str(distinct[0])
    steps = {after - before for before, after in pairwise(distinct)}
    if len(steps) == 1 and len(distinct) > 2:
        step = steps.pop()
        return f"{distinct[0]}-{distinct[-1]}" + (f" by {step}" if step > 1 else "")
    return ",".join(map(str, distinct[:8])) + (",..." if len(distinct) > 8 else "")


IN_ROW = 8
"""Number of a node's ranks to draw in one row."""


def rank_picture(found: RankMap, most_width: float = 15.0) -> Figure:
    """Draw a box for each node, with a cell for each rank. A cell is colored by pipeline rank and shows the rank's
    coordinates. A red frame marks each tensor-parallel group that spans several nodes. The coordinates of the drawing
    are measured in cells. The picture is at most `most_width` inches wide, or as wide as one node."""
    from matplotlib.patches import Rectangle

    nodes = list(found.ranks_of.items())
    drawn, most = nodes[:MOST_NODES], max(len(ranks) for _, ranks in nodes)
    detailed = len(drawn) <= 16
    width, height = (1.1, 0.5) if detailed else (0.3, 0.22)
    in_row = IN_ROW if (IN_ROW + 0.4) * width <= most_width else IN_ROW // 2
    box_width, box_height = min(most, in_row) + 0.4, -(-most // in_row) + 0.9
    columns = max(1, min(len(drawn), int(most_width / (box_width * width))))
    rows = -(-len(drawn) // columns)
    notes = [crossing_line(found, axis) for axis in found.axes]
    split = {rank for group in found.dims.groups("tp") if found.nodes_of(group) > 1 for rank in group}
    legend = "colour: pipeline rank" + ("; red frame: TP crosses nodes" if split else "")
    more = f"; the first {MOST_NODES} are drawn" if len(nodes) > MOST_NODES else ""
    figure_width = max(min(6, most_width), columns * box_width * width)
    title = wrapped("\n".join([f"{_count(found)}{more}", *notes]), figure_width + 1)
    figure = new_figure(figure_width, rows * box_height * height + 0.2 * (title.count("\n") + 3))
    axes = figure.subplots()
    axes.set_title(title)
    for number, (node, ranks) in enumerate(drawn):
        x, y = number % columns * box_width, number // columns * box_height
        axes.add_patch(Rectangle((x, y), box_width - 0.2, box_height - 0.2, fill=False, edgecolor="#d1d9e0"))
        axes.text(x + 0.1, y + 0.35, node[: int(box_width * width * 12)])
        for place, rank in enumerate(ranks):
            at = x + 0.1 + place % in_row, y + 0.6 + place // in_row
            _draw_rank(axes, found, rank, at, detailed, rank in split)
    axes.set(xlim=(-0.05, columns * box_width), ylim=(rows * box_height, -0.05), xticks=[], yticks=[], xlabel=legend)
    axes.spines[:].set_visible(False)
    return figure


def _draw_rank(axes: Axes, found: RankMap, rank: int, at: tuple[float, float], detailed: bool, split: bool) -> None:
    from matplotlib.patches import Rectangle

    coords = found.dims.coords(rank)
    frame = {"edgecolor": "#d1242f", "linewidth": 1.5} if split else {"edgecolor": "white"}
    axes.add_patch(Rectangle(at, 0.94, 0.94, facecolor=HUES[coords["pp"] % len(HUES)], **frame))
    words = [f"{axis}{coords[axis]}" for axis in ("pp", "dp", "ep", "cp", "tp") if found.dims.size(axis) > 1]
    half = -(-len(words) // 2) if len(" ".join(words)) > 14 else len(words)
    lines = [f"rank {rank}", " ".join(words[:half]), " ".join(words[half:])] if detailed else [str(rank)]
    look = {"ha": "center", "va": "center", "fontsize": 7}
    axes.text(at[0] + 0.47, at[1] + 0.47, "\n".join(filter(None, lines)), **look)


if __name__ == "__main__":
    run_tool(main)
