"""One HTML page without network, from page.html: styles and pictures inline, every text of the run escaped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from .drawing import inline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

html: Any = (
    Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True).get_template("page.html").module
)
"""The macros of page.html."""


def figures(pictures: Iterable[Figure | None], wide: bool = False) -> Markup:
    """Pictures beside each other as far as there is room; wide ones below each other, in their own size."""
    return html.pictures([inline(picture) for picture in pictures if picture is not None], wide)
