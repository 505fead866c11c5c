"""Loops over the parts of a sequence, as chunks of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def each(parts: Sequence[T]) -> Iterable[T]:
    """Goes through `parts`. A plan replaces this: it goes through a few, which stand for those beside them. So no
    tensor that a pass makes may outlive the pass."""
    return parts
