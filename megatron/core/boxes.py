"""Rectangular blocks ("boxes") of a global tensor. The functions of this module divide a flat range of elements into
blocks, and intersect two blocks.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class FlatBox:
    """A rectangular block of the global tensor, with the given `shape` and `offset`. The block is stored as elements
    [start, stop) of the flat local shard."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


def boxes_of_flat_range(
    local_offset: Sequence[int], local_shape: Sequence[int], start: int, stop: int
) -> list[FlatBox]:
    """Divide elements [start, stop) of a row-major shard into rectangular blocks.

    The blocks tile the range in flat order. There are at most 2 * ndim - 1 blocks. All complete rows form one block. An
    incomplete row at the start or end of the range is divided into at most one block for each inner dimension.

    Args:
        local_offset: Offset of the shard in the global tensor.
        local_shape: Shape of the shard.
        start: First element of the range.
        stop: One past the last element.
    """
    assert 0 <= start <= stop <= prod(local_shape), (local_shape, start, stop)
    if start == stop:
        return []
    if not local_shape:
        return [FlatBox((), (), 0, 1)]
    row = prod(local_shape[1:])

    def whole_rows(first: int, last: int) -> list[FlatBox]:
        offset = (local_offset[0] + first, *local_offset[1:])
        return [FlatBox(offset, (last - first, *local_shape[1:]), first * row, last * row)] if first < last else []

    def within_row(index: int, begin: int, end: int) -> list[FlatBox]:
        base = index * row
        inner = boxes_of_flat_range(local_offset[1:], local_shape[1:], begin - base, end - base)
        head = local_offset[0] + index
        return [FlatBox((head, *box.offset), (1, *box.shape), box.start + base, box.stop + base) for box in inner]

    first, last = -(-start // row), stop // row
    if first > last:
        return within_row(last, start, stop)
    return [
        *(within_row(first - 1, start, first * row) if start < first * row else []),
        *whole_rows(first, last),
        *(within_row(last, last * row, stop) if last * row < stop else []),
    ]


def overlap(
    a_offset: Sequence[int], a_shape: Sequence[int], b_offset: Sequence[int], b_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of two rectangular blocks of a tensor. The result is a pair of slice tuples: one selects
    the intersection within the first block, the other within the second block. The result is None if the blocks do not
    overlap."""
    in_a, in_b = [], []
    for a, a_length, b, b_length in zip(a_offset, a_shape, b_offset, b_shape, strict=True):
        start, stop = max(a, b), min(a + a_length, b + b_length)
        if start >= stop:
            return None
        in_a.append(slice(start - a, stop - a))
        in_b.append(slice(start - b, stop - b))
    return tuple(in_a), tuple(in_b)
