"""Curves over iterations, of runs of any length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .svg import Svg, legend_width, short_number, ticks

MOST_POINTS = 1500
"""Points of a curve that are drawn; more are less than a pixel apart."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One curve; with `dots`, single measurements."""

    name: str
    points: Points
    dots: bool = False


def thinned(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` of the points: the lowest and the highest of each of equal parts, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    parts = most // 2
    kept: list[tuple[float, float]] = []
    for part in range(parts):
        piece = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        low, high = min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])
        kept += sorted({low, high})
    return kept


def curves(
    title: str,
    unit: str,
    series: Sequence[Series],
    text: Callable[[float], str] = short_number,
    zero: bool = False,
    base: int = 10,
    marks: Sequence[tuple[float, str]] = (),
) -> Svg | None:
    """A chart over iterations; None where no series has a finite value. With `zero` the axis begins at 0; its numbers
    are round in powers of `base`, 10 or 1024. `marks` are upright lines at iterations, with what happened there."""
    finite = [Series(one.name, [(x, y) for x, y in one.points if math.isfinite(y)], one.dots) for one in series]
    finite = [one for one in finite if one.points]
    if not finite:
        return None
    every = [point for one in finite for point in one.points]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = (0.0 if zero else min(y for _, y in every)), max(y for _, y in every)
    if high - low < 1e-9 * max(abs(high), 1e-30):
        low, high = low - max(abs(low) * 0.05, 0.5), high + max(abs(high) * 0.05, 0.5)
    right = right if right > left else left + 1
    entries = [(f"d-{number % 4}", one.name) for number, one in enumerate(finite)] if len(finite) > 1 else []
    heading = f"{title}{f' ({unit})' if unit else ''}"
    needed = legend_width(entries)
    # Where title and legend do not fit beside each other, the legend has a row of its own.
    below = bool(entries) and needed + 6.6 * len(heading) > 500
    width, height, x0, y0 = 580.0, 240.0, 74.0, 52.0 if below else 34.0
    plot_width, plot_height = width - x0 - 16, height - y0 - 46
    last = "; ".join(f"{one.name} ends at {text(one.points[-1][1])}" for one in finite)
    picture = Svg(width, height, title, f"{title} over iterations {left:g} to {right:g}: {last}")

    def place(x: float, y: float) -> tuple[float, float]:
        return x0 + (x - left) / (right - left) * plot_width, y0 + (high - y) / (high - low) * plot_height

    power = 1.0 if base == 10 else float(base) ** int(math.log(max(high, 1.0), base))
    for value in (power * number for number in ticks(low / power, high / power, 5)):
        _, y = place(left, value)
        picture.line(x0, y, x0 + plot_width, y)
        picture.text(x0 - 6, y + 4, text(value), "soft", "end")
    for value in ticks(left, right, 6):
        x, _ = place(value, low)
        picture.line(x, y0 + plot_height, x, y0 + plot_height + 4)
        picture.text(x, y0 + plot_height + 17, short_number(value), "soft", "middle")
    picture.text(x0 + plot_width / 2, height - 8, "iteration", "soft", "middle")
    picture.text(4, 14, heading, "strong")
    for iteration, what in marks:
        if left <= iteration <= right:
            x, _ = place(iteration, low)
            picture.rect(x - 0.75, y0, 1.5, plot_height, "c-reduction", f"iteration {iteration:g}: {what}")
    for number, one in enumerate(finite):
        points = [place(x, y) for x, y in thinned(one.points)]
        if one.dots or len(points) == 1:
            for (x, y), (iteration, value) in zip(points, thinned(one.points), strict=True):
                picture.dot(x, y, f"d-{number % 4}", f"{one.name}, iteration {iteration:g}: {text(value)}")
        else:
            picture.curve(points, f"s-{number % 4}")
    picture.legend(4 if below else x0 + plot_width - needed, 32 if below else 14, entries)
    return picture
