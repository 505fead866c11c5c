"""Values of a config.json by type. This module does not import torch.

A config.json may come from anyone, so that every value is an `object` until one of these functions has looked at it.
They raise TypeError for a value of another type, and KeyError for an absent number or text.
"""

from __future__ import annotations

from collections.abc import Mapping

Values = Mapping[str, object]
"""Key -> value."""

Fields = dict[str, object]
"""Field of TransformerConfig -> value."""


def whole(values: Values, key: str) -> int:
    """A whole number."""
    value = values[key]
    if not isinstance(value, int):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be a whole number")
    return value


def number(values: Values, key: str) -> float:
    """A number. A whole number stays one."""
    value = values[key]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be a number")
    return value


def text(values: Values, key: str) -> str:
    """A text."""
    value = values[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be a text")
    return value


def entries(values: Values, key: str) -> list[object]:
    """A list; an empty one for null and for a key that is absent."""
    value = values.get(key)
    if not value:
        return []
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be a list")
    return list(value)


def table(values: Values, key: str) -> dict[str, object]:
    """An object; an empty one for null and for a key that is absent."""
    value = values.get(key)
    if not value:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be an object")
    return value
