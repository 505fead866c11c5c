"""Second backward pass of attention to selected keys, which sums the key gradients in a fixed order.

Each query has a list of the keys that it attends to. For one chunk of queries at a time, the first backward pass stores
the attention weights and the score gradients of the listed keys. In the second pass, each Triton program computes the
gradients of a block of keys for a slice of channels. The program visits the queries in ascending order. For each query,
the program multiplies the stored score gradients by the query, and the stored attention weights by the output gradient.
If a key is not in a query's list, its weight and its score gradient are zero.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.attention.sparse_attention.kernels.rows_triton import dot
from megatron.extensions.speed.fusions.attention.row_blocks_triton import Rows

PARTS = 4
"""Number of Triton programs among which the queries of one block of keys are divided."""


class Tile(NamedTuple):
    """Block sizes of the kernel that sums key gradients."""

    keys: int
    columns: int
    """Number of columns in each matrix product of a program. Each column is one head of one query."""
    channels: tuple[int, int]
    """Sizes of the two ranges of channels that each program processes: a power of two, and half of this power of
    two."""
    warps: int
    stages: int


@triton.jit
def selected_sum(
    q,
    grad,
    weights,
    ds,
    readers,
    dk,
    sizes,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    SLICES: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the key gradients of a chunk of queries to dk [parts, s, b, w]. The queries are divided into contiguous
    parts. The gradients of each part are summed in fp32, in ascending order of queries.

    `weights` and `ds` are the attention weights and score gradients [n, b, count, heads]. `readers` is a tuple of the
    tensors in `Readers`."""
    samples, heads, count, s = sizes
    places, firsts, ends = readers
    part, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(0) // SLICES
    block = tl.program_id(0) // SLICES
    key = block * KEYS + tl.arange(0, KEYS)
    first, stop = tl.load(firsts + sample * blocks + block), tl.load(ends + sample * blocks + block)
    found = tl.maximum(stop - first, 0)
    begin = first + found * part // tl.num_programs(1)
    end = first + found * (part + 1) // tl.num_programs(1)
    # Each program processes two ranges of channels.
    c = tl.program_id(0) % SLICES * (WIDE + NARROW) + tl.arange(0, WIDE)
    d = tl.program_id(0) % SLICES * (WIDE + NARROW) + WIDE + tl.arange(0, NARROW)
    acc = tl.zeros([KEYS, WIDE], tl.float32)
    more = tl.zeros([KEYS, NARROW], tl.float32)
    i, j = tl.arange(0, ROWS * HEADS), tl.arange(0, ROWS)
    groups = tl.cdiv(heads, HEADS)
    for step in range(0, tl.cdiv(end - begin, ROWS) * groups):
        top = begin + step // groups * ROWS
        row, h = (top + i // HEADS).to(tl.int64), step % groups * HEADS + i % HEADS
        inside = (row < end) & (h < heads)
        of_row = ((top + j).to(tl.int64) * samples + sample) * (blocks * KEYS)
        place = tl.load(places + of_row[None, :] + key[:, None], mask=(top + j < end)[None, :], other=-1)
        place = tl.reshape(tl.broadcast_to(place[:, :, None], (KEYS, ROWS, HEADS)), (KEYS, ROWS * HEADS))
        at = ((row * samples + sample) * count * heads + h)[None, :] + place * heads
        listed = inside[None, :] & (place >= 0)
        of_ds = tl.load(ds + at, mask=listed, other=0.0)
        p = tl.load(weights + at, mask=listed, other=0.0)
        of_q = row * q.row + sample * q.sample + h * q.head
        of_grad = row * grad.row + sample * grad.sample + h * grad.head
        acc = dot(of_ds, _channels(q.data, of_q, inside, c, WIDTH), acc)
        acc = dot(p, _channels(grad.data, of_grad, inside, c, VALUES), acc)
        more = dot(of_ds, _channels(q.data, of_q, inside, d, WIDTH), more)
        more = dot(p, _channels(grad.data, of_grad, inside, d, VALUES), more)
    if end > begin:
        into = dk + ((part.to(tl.int64) * s + key) * samples + sample)[:, None] * WIDTH
        _add(into, acc, key < s, c, WIDTH)
        _add(into, more, key < s, d, WIDTH)


@triton.jit
def _channels(x, at, inside, c, size: tl.constexpr):
    """Load the channels `c` of each row as a block [rows, channels]; elements out of bounds are zero."""
    return tl.load(x + at[:, None] + c[None, :], mask=inside[:, None] & (c < size)[None, :], other=0.0)


@triton.jit
def _add(into, sums, inside, c, WIDTH: tl.constexpr):
    mask = inside[:, None] & (c < WIDTH)[None, :]
    tl.store(into + c[None, :], tl.load(into + c[None, :], mask=mask, other=0.0) + sums, mask=mask)


class Readers(NamedTuple):
    """Lookup tables that map keys to the queries that attend to these keys, for one chunk of queries. All tensors are
    int32."""

    places: Tensor
    """[n, b, blocks * block], the position of each key in the key list of each query; -1 if the key is not in the
    list."""
    firsts: Tensor
    """[b, blocks], the first query whose key list contains a key of the block."""
    ends: Tensor
    """[b, blocks], the position after the last query whose key list contains a key of the block."""


def readers_of(picked: Tensor, s: int, block: int) -> Readers:
    """For each block of keys, find the queries whose key lists contain at least one key of the block. This function
    does not synchronize with the device. `picked` [n, b, count] contains key indices below s; -1 marks unused
    entries."""
    n, b, count = picked.shape
    blocks = triton.cdiv(s, block)
    places = torch.full((n, b, blocks * block + 1), -1, dtype=torch.int32, device=picked.device)
    order = torch.arange(count, dtype=torch.int32, device=picked.device).expand(n, b, -1)
    last = torch.full_like(picked, blocks * block)
    places.scatter_(-1, torch.where(picked >= 0, picked, last).long(), order)
    places = places[..., :-1].contiguous()
    reads = places.unflatten(-1, (blocks, block)).amax(-1) >= 0
    rows = torch.arange(n, dtype=torch.int32, device=picked.device)[:, None, None]
    return Readers(places, torch.where(reads, rows, n).amin(0), torch.where(reads, rows + 1, 0).amax(0))


def sum_of_keys_(dk: Tensor, grad: Tensor, q: Tensor, picked: Tensor, weights: Tensor, ds: Tensor, tile: Tile) -> None:
    """Compute the key gradients of a chunk of queries, and add them to `dk` in a fixed order.

    Args:
        dk: [parts, s, b, w], fp32 key gradients. The queries are divided into parts, each of which has a separate sum.
        grad: [n, b, heads, values], output gradients.
        q: [n, b, heads, w], queries.
        picked: [n, b, count], indices of the keys that each query attends to; -1 marks unused entries.
        weights: [n, b, count, heads], attention weights of the listed keys.
        ds: [n, b, count, heads], gradients of the scores of the listed keys.
        tile: Block sizes.
    """
    parts, s, b, width = dk.shape
    heads, values = q.shape[2], grad.shape[-1]
    held = min(tile.columns, triton.next_power_of_2(max(16, heads)))
    readers = readers_of(picked, s, tile.keys)
    given = Rows.of(q), Rows.of(grad), weights, ds, tuple(readers), dk, (b, heads, picked.shape[-1], s)
    slices = triton.cdiv(width, sum(tile.channels))
    launch = selected_sum[(slices * triton.cdiv(s, tile.keys), parts, b)]
    constants = width, values, *tile.channels, slices, held, tile.keys, tile.columns // held
    launch(*given, *constants, num_warps=tile.warps, num_stages=tile.stages)
