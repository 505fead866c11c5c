"""Typed access to values of a config.json. This module does not import torch.

A config.json may be untrusted, so each value is typed as `object` until a function of this module checks it. The
functions raise TypeError for a value of the wrong type, and KeyError for a missing number or string.
"""

from __future__ import annotations

from collections.abc import Mapping

Values = Mapping[str, object]
"""Keys and values of a config.json."""

Fields = dict[str, object]
"""Fields of TransformerConfig and their values."""


def whole(values: Values, key: str) -> int:
    """Return the integer value of a key."""
    value = values[key]
    if not isinstance(value, int):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be a whole number")
    return value


def number(values: Values, key: str) -> float:
    """Return the value of a key, which must be a number. An integer is returned as an int and not as a float."""
    value = values[key]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be a number")
    return value


def text(values: Values, key: str) -> str:
    """Return the value of a key, which must be a string."""
    value = values[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be a text")
    return value


def entries(values: Values, key: str) -> list[object]:
    """Return the value of a key, which must be a list. The result is empty if the value is null or the key is
    missing."""
    value = values.get(key)
    if not value:
        return []
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be a list")
    return list(value)


def table(values: Values, key: str) -> dict[str, object]:
    """Return the value of a key, which must be a JSON object. The result is empty if the value is null or the key is
    missing."""
    value = values.get(key)
    if not value:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"{key} = {str(value)[:80]!r} must be an object")
    return value
