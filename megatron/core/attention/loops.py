"""Loops over the parts of a sequence, as chunks of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def each(parts: Sequence[Any]) -> Iterable[Any]:
    """Goes through `parts`. A plan replaces this: it goes through a few, which stand for those beside them. So no
    tensor that a pass makes may outlive the pass."""
    return parts
