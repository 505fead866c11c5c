"""Fields of a task for one document: jinja templates, columns, or functions. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import SandboxedEnvironment

Document = Mapping[str, Any]


@cache
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = lambda text, pattern, repl, count=0: re.sub(pattern, repl, text, count=count)
    return environment


@cache
def _template(source: str) -> Template:
    return _environment().from_string(source)


def rendered(source: str, document: Document) -> str:
    """The text of a template. Raises jinja2.TemplateError."""
    return _template(source).render(**document)


def text_of(source: Any, document: Document, has_choices: bool) -> Any:
    """doc_to_text: text, or the number of the right text among doc_to_choice."""
    if callable(source):
        return source(document)
    if not isinstance(source, str):
        return source
    if source in document:
        return document[source]
    text = rendered(source, document)
    return int(text) if has_choices and text.isdigit() else text


def target_of(source: Any, document: Document, has_choices: bool) -> Any:
    """doc_to_target: text, the number of a choice, or a list of either."""
    text = text_of(source, document, has_choices)
    if not isinstance(source, str) or source in document or not isinstance(text, str):
        return text
    if len(text) >= 2 and text[0] == "[" and text[-1] == "]":
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text
    return text


def choices_of(source: Any, document: Document) -> list[str]:
    """doc_to_choice. Raises ValueError unless it is a list of at least two texts."""
    if callable(source):
        found = source(document)
    elif isinstance(source, str):
        found = document[source] if source in document else ast.literal_eval(rendered(source, document))
    else:
        found = list(source.values()) if isinstance(source, Mapping) else source
    if not isinstance(found, list | tuple) or len(found) < 2 or not all(isinstance(each, str) for each in found):
        raise ValueError(f"doc_to_choice {found!r} must be a list of at least two texts")
    return list(found)
