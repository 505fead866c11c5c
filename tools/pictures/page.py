"""One HTML page that needs nothing else: styles and pictures inline, no script, every text of the run escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .svg import Svg, style

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def paragraph(text: str, look: str = "") -> str:
    return f'<p class="{look}">{escape(text)}</p>' if look else f"<p>{escape(text)}</p>"


def bullets(lines: Iterable[str]) -> str:
    """A list; nothing for none."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def cards(facts: Sequence[tuple[str, str, str]]) -> str:
    """(name, value, class) of each figure."""
    return (
        '<dl class="cards">'
        + "".join(
            f'<div><dt>{escape(name)}</dt><dd class="{look}">{escape(value)}</dd></div>' for name, value, look in facts
        )
        + "</dl>"
    )


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """Columns numbered in `right` are aligned to the right."""
    if not rows:
        return ""

    def cell(tag: str, column: int, value: Any) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        look = ' class="n"' if column in right else ""
        return f"<{tag}{scope}{look}>{escape(str(value))}</{tag}>"

    heads = "".join(cell("th", column, name) for column, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(cell("td", column, value) for column, value in enumerate(row)) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figures(pictures: Iterable[Svg | None], wide: bool = False) -> str:
    """Pictures beside each other as far as there is room; wide ones below each other, in their own size."""
    shown = [f"<figure>{picture.inline()}</figure>" for picture in pictures if picture is not None]
    return f'<div class="{"wide" if wide else "pictures"}">{"".join(shown)}</div>' if shown else ""


def details(title: str, content: str) -> str:
    """Content that a reader opens."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """The page of (title, content) sections, with a list of them at the top."""
    names = [(name.lower().replace(" ", "-"), name) for name, _ in sections]
    links = "".join(f'<a href="#{key}">{escape(name)}</a>' for key, name in names)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(name)}</h2>{content}</section>'
        for (key, name), (_, content) in zip(names, sections, strict=True)
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{style()}</style></head><body><header><h1>{escape(title)}</h1>{lead}"
        f'<nav aria-label="sections">{links}</nav></header><main>{body}</main></body></html>\n'
    )
