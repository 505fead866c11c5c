"""Matplotlib figures with a common style: curves over iterations, rows of bars, and numbers with units."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.training.config.batch_size import byte_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from megatron.core.pipeline_parallel.actions import Action
    from megatron.core.pipeline_parallel.walk import Timed

COLOURS = {
    "F": "#4c78a8",
    "B": "#72b7b2",
    "I": "#72b7b2",
    "W": "#54a24b",
    "FB": "#b279a2",
    "data": "#9d755d",
    "optimizer": "#b279a2",
    "reduction": "#e45756",
    "other": "#c9c9c4",
}
NAMES = {
    "F": "F: forward",
    "B": "B: backward",
    "I": "I: backward, input gradient",
    "W": "W: backward, weight gradient",
    "FB": "FB: forward and backward in turns",
}
HUES = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#cdb4db", "#84a59d", "#f6bd60", "#a3b18a")
"""Fill colors that are light enough for dark text."""

SOFT = "#59636e"
WIDE, NARROW = 11.0, 4.6
"""Widths of pictures in inches, for a desktop window and for a phone."""

LOOK = {
    "svg.fonttype": "none",
    "svg.hashsalt": "",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Matplotlib settings of all pictures. Text is not parsed as a formula, so that names of runs may contain a $."""

IDS = re.compile(r'(\bid="|href="#|url\(#)')
_numbers = count()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty Matplotlib figure. `width` and `height` are in inches. Raises ValueError if matplotlib is not
    installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'paritrain[plot]'") from None
    matplotlib.rcParams.update(LOOK)
    warnings.filterwarnings("ignore", "Glyph")  # viewers may have glyphs that matplotlib lacks
    return Figure((width, height), layout="constrained")


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix (`refuse_picture`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def inline(figure: Figure) -> str:
    """Return a figure as an SVG element for a page, with unique ids."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=nothing)
    svg = text.getvalue()
    return IDS.sub(rf"\g<1>picture-{next(_numbers)}-", svg[svg.index("<svg") :])


@dataclass(frozen=True)
class Marks:
    """Restarts and data phases of a run, which charts mark on the iteration axis."""

    restarts: Sequence[float] = ()
    phases: Sequence[tuple[float, str]] = ()
    """For each phase, the number of iterations before it and its name."""


@dataclass(frozen=True)
class Series:
    """Points of a chart: a curve, or separate dots if `dots` is true."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    colour: str | None = None


def curves(
    title: str,
    unit: str,
    series: Sequence[Series],
    text: Callable[[float], str] | None = None,
    zero: bool = False,
    marks: Marks = Marks(),
    size: tuple[float, float] = (4.9, 2.5),
    along: str = "iteration",
) -> Figure | None:
    """Draw a chart of the series. The horizontal axis shows iterations or the quantity named by `along`. Return None if
    no series has a value that can be drawn. If `zero` is true, the vertical axis begins at 0. `text` formats the values
    on the vertical axis. If `text` formats bytes, ticks are at powers of two."""
    finite = [replace(one, points=[point for point in one.points if all(map(is_drawable, point))]) for one in series]
    finite = [one for one in finite if one.points]
    if not finite:
        return None
    figure = new_figure(*size)
    axes = figure.subplots()
    for one in finite:
        look: dict[str, Any] = {"linestyle": "none" if one.dots else "-", "color": one.colour}
        look |= {"marker": "o", "markersize": 4} if one.dots or len(one.points) == 1 else {}
        axes.plot(*zip(*one.points, strict=True), linewidth=1.2, label=one.name or None, **look)
    draw_marks(axes, marks)
    axes.set(title=f"{title}{f' ({unit})' if unit else ''}", xlabel=along)
    axes.grid(alpha=0.3)
    if zero:
        axes.set_ylim(bottom=0)
    if text is not None:
        write_values(axes.yaxis, text)
    if along != "iteration":
        write_values(axes.xaxis, short_number)
    if sum(bool(one.name) for one in finite) > 1:
        figure.legend(loc="outside lower left", ncols=2, fontsize="small", frameon=False)
    return figure


LARGEST = 1e60
"""Largest magnitude that charts show. Larger values, and nonzero values below 1 / LARGEST, are omitted, because
matplotlib's ticks would overflow."""


def is_drawable(value: float) -> bool:
    return value == 0 or (math.isfinite(value) and 1 / LARGEST <= abs(value) <= LARGEST)


def draw_marks(axes: Axes, marks: Marks) -> None:
    """Draw a vertical line at each restart of a run, and a line with the name of the phase at the beginning of each
    data phase."""
    first, last = axes.get_xlim()
    for mark in marks.restarts:
        if first <= mark <= last:
            axes.axvline(mark, color=COLOURS["reduction"], linewidth=1)
    beside: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
    for begin, name in marks.phases:
        if first <= begin <= last:
            axes.axvline(begin, color=SOFT, linewidth=0.8, linestyle="--")
            axes.annotate(name, (begin, 1), (2, -2), rotation=90, color=SOFT, fontsize="small", **beside)


def wrapped(text: str, width: float) -> str:
    """Wrap a title to fit into a figure of `width` inches."""
    return "\n".join(textwrap.fill(line, max(20, int(13 * (width - 1.4)))) for line in text.splitlines())


def write_values(axis: Axis, text: Callable[[float], str], most_values: int = 6) -> None:
    """Format the tick labels of an axis with the function `text`. If the values are bytes, place the ticks at round
    multiples of the displayed unit, such as GiB."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    axis.set_major_locator(MaxNLocator(most_values))
    if text is byte_text:
        most = max(axis.get_view_interval()[1], 1.0)
        unit = 1024 ** int(math.log(most, 1024))
        steps = MaxNLocator(most_values).tick_values(0, most / unit)
        axis.set_major_locator(MultipleLocator((steps[1] - steps[0]) * unit))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value) if value else "0"))


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def idle_shares(axes: Axes, shares: Sequence[float]) -> None:
    """Label each row with its idle fraction, to the right of the chart."""
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(shares)), [f"{share:.1%}" for share in shares])
    right.set_ylabel("idle")


def draw_actions(
    axes: Axes,
    row: int,
    line: Sequence[Timed],
    start: float,
    scale: float,
    opacity: Callable[[Action], float] = lambda action: 1.0,
    points: float = 7,
) -> None:
    """Draw a bar for each action of a rank, with the micro-batch number if there is room. `scale` is the width of one
    time unit in points."""
    times = [(timed.start - start, timed.stop - timed.start) for timed in line]
    fills = [(COLOURS[timed.action.kind.value], opacity(timed.action)) for timed in line]
    axes.broken_barh(times, (row - 0.42, 0.84), facecolors=fills, edgecolors="white", linewidth=0.4)
    for (begin, length), (action, *_) in zip(times, line, strict=True):
        label = str(action.microbatch)
        if length * scale > 2 + points / 2 * len(label):
            look = {"ha": "center", "va": "center", "fontsize": points, "clip_on": True}
            axes.text(begin + length / 2, row, label, color="white" if action.kind.value == "F" else "black", **look)


def fill_legend(figure: Figure, fills: Mapping[str, str]) -> None:
    """Draw a legend with the color of each name below the figure."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=name) for name, colour in fills.items()]
    columns = len(patches) if figure.get_figwidth() > NARROW else 2
    figure.legend(handles=patches, loc="outside lower left", ncols=columns, fontsize="small")


def short_number(value: float) -> str:
    """Format a number with three to four digits, with the suffix k, M, G or T for large numbers."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (size if size > 1e4 else 1e3):.4g}{unit}"
    return f"{value:.4g}"


def time_text(microseconds: float) -> str:
    """Format a duration in a suitable unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.4g} {unit}"
    return f"{microseconds:.4g} µs"
