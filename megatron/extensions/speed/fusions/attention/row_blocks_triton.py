"""Functions for row blocks in Triton attention kernels: loads, stores, the ranges to which rows attend, and dropout.

A program instance that processes a block of queries reads only the key blocks that contain keys to which these queries
attend. Likewise, an instance that processes a block of keys reads only the query blocks with queries that attend to
these keys. Only the blocks at both ends of the range need a mask, because every row of the program attends to all
blocks in between.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Rows(NamedTuple):
    """Pointer to a tensor [n, samples, heads, channels], and strides of the tensor. Channels are adjacent in memory."""

    data: Tensor
    row: int
    sample: int
    head: int

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        return cls(x, *x.stride()[:3])


class Bounds(NamedTuple):
    """Start and end of the range to which each row attends, as an int32 tensor [2, 1 or samples, n]."""

    data: Tensor
    sample: int
    """Stride in `data` between the bounds of two samples; 0 if all samples have the same bounds."""
    stop: int
    """Stride of dimension 0 of `data`: the distance in elements from the start of a range to the end of this range."""

    @classmethod
    def of(cls, x: Tensor) -> Bounds:
        return cls(x, x.shape[2] if x.shape[1] > 1 else 0, x.stride(0))


@triton.jit
def _absorb(state, value):
    """Compute the same hash as `megatron.core.dropout._absorb`, for uint64 values."""
    x = value.to(tl.uint64) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64) + state
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def hash_rows(key, sample_index, sample, head, places, i, in_i):
    """Compute the uint32 dropout hash of each row in i, for one head."""
    state = _absorb(key.to(tl.uint64), tl.load(sample_index + sample))
    rows = _absorb(_absorb(state, head), tl.load(places + i, mask=in_i, other=0))
    return rows.to(tl.uint32) + tl.full([], 0x80000000, tl.uint32)


@triton.jit
def is_dropped(bits, limit):
    """Return the mask of query-key pairs that dropout drops. For each pair, `bits` contains the sum of the row hash and
    the column hash as uint32."""
    bits = (bits ^ (bits >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    bits = (bits ^ (bits >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return bits.to(tl.int32, bitcast=True) < limit


@triton.jit
def load_bits(bits, i, in_i):
    return tl.load(bits + i, mask=in_i, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def of_head(x, sample, head):
    """Return a pointer to the elements of one head in the tensor x (`Rows`)."""
    return x.data + sample.to(tl.int64) * x.sample + head * x.head


@triton.jit
def load_rows(x, start, stride, i, in_i, d, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Load the rows start + i of a matrix with WIDTH channels. x points to the matrix, and `stride` is the distance
    between its rows. Rows for which in_i is False, and channels d >= WIDTH, are loaded as 0."""
    at = x + tl.full([], 1, tl.int64) * start * stride + i[:, None] * stride + d[None, :]
    if MASKED or d.shape[0] != WIDTH:
        return tl.load(at, mask=in_i[:, None] & (d < WIDTH)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def store_rows(x, values, row, inside, WIDTH: tl.constexpr):
    """Store `values` in rows `row` of the contiguous matrix x, which has WIDTH channels. Rows for which `inside` is
    False are not stored."""
    d = tl.arange(0, values.shape[1])
    at = x + row[:, None] * WIDTH + d[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=inside[:, None] & (d < WIDTH)[None, :])


@triton.jit
def load_bounds(bounds, sample, i, in_i):
    """Load the ranges of the rows i of a sample. Returns `first` and `stop`: each row attends to [first, stop)."""
    at = bounds.data + sample * bounds.sample + i
    return tl.load(at, mask=in_i, other=0), tl.load(at + bounds.stop, mask=in_i, other=0)


@triton.jit
def block_ranges(first, stop, inside, size, BLOCK: tl.constexpr):
    """Divide the keys or queries to which the rows attend into blocks. Each row attends to a range [first, stop).
    Returns five numbers: the start of the first block, the start and the end of the blocks to which all rows attend,
    and the numbers of blocks before this start and after this end."""
    begin = tl.min(tl.where(inside, first, size)) // BLOCK * BLOCK
    end = tl.maximum(tl.max(tl.where(inside, stop, 0)), begin)
    end = begin + (end - begin + BLOCK - 1) // BLOCK * BLOCK
    full = (tl.max(tl.where(inside, first, 0)) + BLOCK - 1) // BLOCK * BLOCK
    full = tl.minimum(full, end)
    full_end = tl.maximum(tl.min(tl.where(inside, stop, size)) // BLOCK * BLOCK, full)
    return begin, full, full_end, (full - begin) // BLOCK, (end - full_end) // BLOCK


@triton.jit
def add_blocks(add_block, sums, own, other, seen, ranges, numbers, WIDTHS: tl.constexpr, BLOCK: tl.constexpr):
    """Loop over blocks of rows of `other`, and add their contributions to `sums`, the results for the rows `own` of
    this program. If `own` are queries, `other` are keys and values, and vice versa. `seen` contains the range (first,
    stop) of each row. The loop starts with the blocks to which every row attends."""
    begin, full, full_end, before, behind = ranges
    for start in range(full, full_end, BLOCK):
        sums = add_block(sums, own, other, seen, start, numbers, WIDTHS, BLOCK, False)
    for block in range(0, before + behind):
        start = tl.where(block < before, begin + block * BLOCK, full_end + (block - before) * BLOCK)
        sums = add_block(sums, own, other, seen, start, numbers, WIDTHS, BLOCK, True)
    return sums


@triton.jit
def is_seen(seen, places):
    first, stop = seen
    return (places[None, :] >= first[:, None]) & (places[None, :] < stop[:, None])
