"""SVG by hand: elements with escaped text, colours for light and dark, and scales with round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

COLOURS = {
    "F": ("#4c78a8", "#5b8fc7"),
    "B": ("#72b7b2", "#4d9c96"),
    "I": ("#72b7b2", "#4d9c96"),
    "W": ("#54a24b", "#63b35a"),
    "FB": ("#b279a2", "#c48ab4"),
    "data": ("#9d755d", "#b58a70"),
    "optimizer": ("#b279a2", "#c48ab4"),
    "reduction": ("#e45756", "#ee6a69"),
    "other": ("#c9c9c4", "#5d646e"),
}
"""Class -> its fill in light and in dark."""

HUES = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#cdb4db", "#84a59d", "#f6bd60", "#a3b18a")
"""Fills of classes h-0, h-1, ...: light enough for dark text by day and night."""

SERIES = [("#2b6cb0", "#6cb0f5"), ("#c2410c", "#fb923c"), ("#15803d", "#4ade80"), ("#7e22ce", "#c084fc")]

STYLE = """
.pic { --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --paper: #ffffff; }
.pic text { fill: var(--ink); font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
.pic text.soft { fill: var(--soft); } .pic .small { font-size: 10px; } .pic .strong { font-weight: 600; }
.pic .grid { stroke: var(--line); fill: none; } .pic .paper { fill: var(--paper); } .pic text.on { fill: #10151a; }
.pic .bar { stroke: var(--paper); stroke-width: 0.5; } .pic .crossing { stroke: #d1242f; stroke-width: 2; fill: none; }
"""


def style() -> str:
    """The rules of all pictures; a page has them once."""
    light = [f".pic .c-{name} {{ fill: {fill}; }}" for name, (fill, _) in COLOURS.items()]
    dark = [f".pic .c-{name} {{ fill: {fill}; }}" for name, (_, fill) in COLOURS.items()]
    light += [f".pic .h-{number} {{ fill: {fill}; }}" for number, fill in enumerate(HUES)]
    for number, (fill, night) in enumerate(SERIES):
        light.append(f".pic .s-{number} {{ stroke: {fill}; fill: none; }} .pic .d-{number} {{ fill: {fill}; }}")
        dark.append(f".pic .s-{number} {{ stroke: {night}; }} .pic .d-{number} {{ fill: {night}; }}")
    dark.insert(0, ".pic { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117; }")
    return f"{STYLE}{' '.join(light)}\n@media (prefers-color-scheme: dark) {{ {' '.join(dark)} }}\n"


class Svg:
    """A picture under way: shapes are added in order, later ones above earlier ones."""

    def __init__(self, width: float, height: float, title: str, description: str = "") -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, look: str, tip: str = "") -> None:
        tag = f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.1))}" height="{_n(height)}" class="{look}"'
        self._parts.append(f"{tag}><title>{escape(tip)}</title></rect>" if tip else f"{tag}/>")

    def text(self, x: float, y: float, text: str, look: str = "", anchor: str = "start") -> None:
        where = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"'
        self._parts.append(f'<text {where} class="{look}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str = "grid") -> None:
        self._parts.append(f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{look}"/>')

    def curve(self, points: Sequence[tuple[float, float]], look: str) -> None:
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="{look}" stroke-width="1.5"/>')

    def dot(self, x: float, y: float, look: str, tip: str = "") -> None:
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="3" class="{look}"><title>{escape(tip)}</title></circle>'
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """(class, text) of each entry, in one row."""
        for look, text in entries:
            self.rect(x, y - 9, 12, 10, look)
            self.text(x + 16, y, text)
            x += legend_width([(look, text)])

    def inline(self) -> str:
        """As an element of a page that has `style()`."""
        return self._element("")

    def file(self) -> str:
        """As a file of its own."""
        background = f'<style>{style()}</style><rect class="paper" width="100%" height="100%"/>'
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + self._element(background) + "\n"

    def _element(self, first: str) -> str:
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}" height="{_n(self.height)}"'
        told = f"<title>{escape(self.title)}</title>" + (
            f"<desc>{escape(self.description)}</desc>" if self.description else ""
        )
        tag = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" class="pic" aria-label="{escape(self.title)}" {size}>'
        )
        return f"{tag}{told}{first}{''.join(self._parts)}</svg>"


def legend_width(entries: Sequence[tuple[str, str]]) -> float:
    """How far `Svg.legend` reaches, about."""
    return sum(30 + 6.6 * len(text) for _, text in entries)


def write_svg(picture: Svg, path: Path) -> None:
    """Writes a picture to a file, whose name ends in .svg (`refuse_picture`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture.file(), encoding="utf-8")
    print(f"wrote {path}")


def _n(value: float) -> str:
    """A coordinate, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` + 1 round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def short_number(value: float) -> str:
    """Three to four digits, with k, M, G or T for large ones."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (size if size > 1e4 else 1e3):.4g}{unit}"
    return f"{value:.4g}"


def byte_text(value: float) -> str:
    """Bytes in the binary unit that fits."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return (
                f"{value:.0f} {unit}"
                if unit == "bytes"
                else f"{value:.3g} {unit}"
                if value < 1000
                else f"{value:.0f} {unit}"
            )
        value /= 1024
    raise AssertionError


def time_text(microseconds: float) -> str:
    """A time in the unit that fits."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.4g} {unit}"
    return f"{microseconds:.4g} µs"
