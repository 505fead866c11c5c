"""Shared functions of Triton kernels that gather selected rows. The functions load channels in four slices, multiply
these slices, and map a Triton program to its queries and heads."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Widths(NamedTuple):
    """Numbers of channels per key, and the block sizes to which these numbers are padded."""

    values: int
    """Number of value channels, which are the first channels of a key."""
    rest: int
    part: int
    """Number of channels in each of the four slices of the value channels: a quarter of `values`, rounded up to a power
    of two."""
    held_rest: int
    """Number of channels other than value channels, rounded up to a power of two; 0 if there are none."""

    @classmethod
    def of(cls, width: int, values: int) -> Widths:
        rest = width - values
        part = max(16, triton.next_power_of_2(values) // 4)
        return cls(values, rest, part, max(16, triton.next_power_of_2(rest)) if rest else 0)


class Blocks(NamedTuple):
    """Block sizes of a kernel, and the number of warps and pipeline stages of each Triton program."""

    heads: int
    keys: int
    warps: int
    stages: int


@triton.jit
def load_rows(x, at, inside, start: tl.constexpr, size: tl.constexpr, HELD: tl.constexpr):
    """Load channels `start` to `start + size` of rows of x, and pad them to [rows, HELD]. The offsets `at` are the
    starts of these rows. Elements out of bounds are zero."""
    c = tl.arange(0, HELD)
    where = x + at[:, None] + (start + c)[None, :]
    if size >= HELD:
        return tl.load(where, mask=inside[:, None], other=0.0)
    return tl.load(where, mask=inside[:, None] & (c < size)[None, :], other=0.0)


@triton.jit
def load_values(x, at, inside, WIDTHS: tl.constexpr):
    """Load the value channels of each row as four slices of equal size."""
    VALUES: tl.constexpr = WIDTHS[0]
    PART: tl.constexpr = WIDTHS[2]
    return (
        load_rows(x, at, inside, 0, VALUES, PART),
        load_rows(x, at, inside, PART, VALUES - PART, PART),
        load_rows(x, at, inside, 2 * PART, VALUES - 2 * PART, PART),
        load_rows(x, at, inside, 3 * PART, VALUES - 3 * PART, PART),
    )


@triton.jit
def load_rest(x, at, inside, values, WIDTHS: tl.constexpr):
    """Load the channels after the value channels of each row. If all channels are value channels, the result is
    arbitrary and must not be used."""
    found = values[0]
    if WIDTHS[3]:
        found = load_rows(x, at, inside, WIDTHS[0], WIDTHS[1], WIDTHS[3])
    return found


@triton.jit
def dot(a, b, sums):
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def products(a, b):
    """Return the matrix product of a and the transpose of b in fp32. Both a and b are tuples of the four slices of the
    value channels."""
    found = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    return dot(a[3], tl.trans(b[3]), dot(a[2], tl.trans(b[2]), dot(a[1], tl.trans(b[1]), found)))


@triton.jit
def scores_of(keys, rest, queries, of_queries, WIDTHS: tl.constexpr):
    """Return the attention scores [keys, heads] in fp32."""
    found = products(keys, queries)
    if WIDTHS[3]:
        found = dot(rest, tl.trans(of_queries), found)
    return found


@triton.jit
def add_rows(sums, keys, weights):
    """For each of the four slices of the value channels, add the product of the transposed keys [keys, PART] and the
    weights [keys, heads] to sums [PART, heads]."""
    return (
        dot(tl.trans(keys[0]), weights, sums[0]),
        dot(tl.trans(keys[1]), weights, sums[1]),
        dot(tl.trans(keys[2]), weights, sums[2]),
        dot(tl.trans(keys[3]), weights, sums[3]),
    )


@triton.jit
def scaled(sums, factors):
    f = factors[None, :]
    return sums[0] * f, sums[1] * f, sums[2] * f, sums[3] * f


@triton.jit
def end_of_list(lists, count, SCAN: tl.constexpr):
    """Return the position after the last used entry of a query's list."""
    found = 0
    j = tl.arange(0, SCAN)
    for start in range(0, count, SCAN):
        at = tl.load(lists + start + j, mask=start + j < count, other=-1)
        found = tl.maximum(found, tl.max(tl.where(at >= 0, start + j + 1, 0), 0))
    return found


@triton.jit
def place_of(samples, heads, BLOCK: tl.constexpr):
    """Return five values that define the work of this Triton program: the query row, the sample, the indices of the
    heads, a mask that is True for heads that exist, and the offset of the row's first head in a tensor [n, b, heads].
    The programs that start first process the last rows, which have the most keys. Adjacent programs process heads of
    the same row, because these heads attend to the same keys."""
    blocks = tl.cdiv(heads, BLOCK)
    row = (tl.num_programs(0) // blocks - 1 - tl.program_id(0) // blocks).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64)
    h = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    return row, sample, h, h < heads, (row * samples + sample) * heads


@triton.jit
def store_heads(x, values, before, h, in_h, start: tl.constexpr, size: tl.constexpr, WIDTH: tl.constexpr):
    """Store `values` [HELD, heads] in channels `start` to `start + size` of x [n, b, heads, WIDTH]."""
    c = tl.arange(0, values.shape[0])
    at = x + (before + h)[None, :] * WIDTH + (start + c)[:, None]
    tl.store(at, values.to(x.dtype.element_ty), mask=in_h[None, :] & (c < size)[:, None])


@triton.jit
def store_values(x, sums, before, h, in_h, WIDTHS: tl.constexpr, WIDTH: tl.constexpr):
    VALUES: tl.constexpr = WIDTHS[0]
    PART: tl.constexpr = WIDTHS[2]
    store_heads(x, sums[0], before, h, in_h, 0, VALUES, WIDTH)
    store_heads(x, sums[1], before, h, in_h, PART, VALUES - PART, WIDTH)
    store_heads(x, sums[2], before, h, in_h, 2 * PART, VALUES - 2 * PART, WIDTH)
    store_heads(x, sums[3], before, h, in_h, 3 * PART, VALUES - 3 * PART, WIDTH)
