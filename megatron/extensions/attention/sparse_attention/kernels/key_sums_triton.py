"""The gradients of keys summed in a fixed order: the second pass of the backward of attention to selected keys.

A program goes through the queries that have selected a key of its block, in ascending order, and computes their scores
again. Keys of the block that a query has not selected have no weight.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.attention.sparse_attention.kernels.rows_triton import (
    Blocks,
    Widths,
    dot,
    load_rest,
    load_values,
    products,
    scores_of,
)
from megatron.extensions.speed.fusions.attention.row_blocks_triton import Rows

PARTS = 4
"""Programs that share the queries of a block of keys."""


@triton.jit
def _added_to_keys(sums, ds, queries, p, grads):
    return (
        dot(p, grads[0], dot(ds, queries[0], sums[0])),
        dot(p, grads[1], dot(ds, queries[1], sums[1])),
        dot(p, grads[2], dot(ds, queries[2], sums[2])),
        dot(p, grads[3], dot(ds, queries[3], sums[3])),
    )


@triton.jit
def selected_sum(q, k, lists, grad, lse, delta, readers, dk, sizes, scale, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr):
    """dk [parts, s, b, w] in fp32: sums over parts of the queries that have selected a key, in ascending order.

    `lists` [n, b, count] are in ascending order. `readers`: the queries [n, b, blocks] that have selected a key of a
    block, in ascending order, how many these are [b, blocks], and the place [n, b, blocks + 1] in a query's list at
    which a block's keys begin."""
    samples, heads, count, s = sizes
    order, counts, places = readers
    PART: tl.constexpr = WIDTHS[2]
    WIDTH: tl.constexpr = WIDTHS[0] + WIDTHS[1]
    HEADS: tl.constexpr = BLOCKS[0]
    KEYS: tl.constexpr = BLOCKS[1]
    block, part = tl.program_id(0), tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(0)
    i = tl.arange(0, KEYS)
    key = block * KEYS + i
    at, in_k = (key.to(tl.int64) * samples + sample) * WIDTH, key < s
    keys = load_values(k, at, in_k, WIDTHS)
    rest = load_rest(k, at, in_k, keys, WIDTHS)
    zeros = tl.zeros([KEYS, PART], tl.float32)
    acc = (zeros, zeros, zeros, zeros)
    of_rest = zeros
    if WIDTHS[3]:
        REST: tl.constexpr = WIDTHS[3]
        of_rest = tl.zeros([KEYS, REST], tl.float32)
    of_heads = tl.cdiv(heads, HEADS)
    found = tl.load(counts + sample * blocks + block)
    first, stop = found * part // tl.num_programs(1), found * (part + 1) // tl.num_programs(1)
    for step in range(first * of_heads, stop * of_heads):
        row = tl.load(order + ((step // of_heads).to(tl.int64) * samples + sample) * blocks + block).to(tl.int64)
        start = tl.load(places + (row * samples + sample) * (blocks + 1) + block)
        own = tl.load(lists + (row * samples + sample) * count + start + i, mask=start + i < count, other=-1)
        chosen = tl.max((own[None, :] == key[:, None]).to(tl.int32), 1) > 0
        h = (step % of_heads) * HEADS + tl.arange(0, HEADS)
        in_h, before = h < heads, (row * samples + sample) * heads
        of_row = row * q.row + sample * q.sample + h * q.head
        queries = load_values(q.data, of_row, in_h, WIDTHS)
        of_queries = load_rest(q.data, of_row, in_h, queries, WIDTHS)
        grads = load_values(grad.data, row * grad.row + sample * grad.sample + h * grad.head, in_h, WIDTHS)
        sums = tl.load(lse + before + h, mask=in_h, other=0.0) * 1.4426950408889634
        deltas = tl.load(delta + before + h, mask=in_h, other=0.0)
        scores = scores_of(keys, rest, queries, of_queries, WIDTHS) * (scale * 1.4426950408889634)
        weights = tl.where(chosen[:, None] & in_h[None, :], tl.exp2(scores - sums[None, :]), 0.0)
        ds = (weights * (products(keys, grads) - deltas[None, :]) * scale).to(keys[0].dtype)
        acc = _added_to_keys(acc, ds, queries, weights.to(keys[0].dtype), grads)
        if WIDTHS[3]:
            of_rest = dot(ds, of_queries, of_rest)
    into = dk + part.to(tl.int64) * s * samples * WIDTH
    VALUES: tl.constexpr = WIDTHS[0]
    _store_keys(into, acc[0], at, in_k, 0, VALUES)
    _store_keys(into, acc[1], at, in_k, PART, VALUES - PART)
    _store_keys(into, acc[2], at, in_k, 2 * PART, VALUES - 2 * PART)
    _store_keys(into, acc[3], at, in_k, 3 * PART, VALUES - 3 * PART)
    if WIDTHS[3]:
        _store_keys(into, of_rest, at, in_k, VALUES, WIDTHS[1])


@triton.jit
def _store_keys(x, values, at, inside, start: tl.constexpr, size: tl.constexpr):
    c = tl.arange(0, values.shape[1])
    tl.store(x + at[:, None] + (start + c)[None, :], values, mask=inside[:, None] & (c < size)[None, :])


def sum_of_keys(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    picked: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    widths: Widths,
    blocks: Blocks,
) -> Tensor:
    """dk [s, b, w] in fp32, summed in the same order each time."""
    (s, b, width), heads = k.shape, q.shape[2]
    lists, readers = readers_of(picked, s, blocks.keys)
    dk = torch.empty(PARTS, s, b, width, dtype=torch.float32, device=k.device)
    given = Rows.of(q), k, lists, Rows.of(grad), lse, delta, tuple(readers), dk, (b, heads, picked.shape[-1], s), scale
    launch = selected_sum[(triton.cdiv(s, blocks.keys), PARTS, b)]
    launch(*given, tuple(widths), (blocks.heads, blocks.keys), num_warps=blocks.warps, num_stages=blocks.stages)
    return dk.sum(0)


class Readers(NamedTuple):
    """By block of keys, the queries that have selected one of them. int32."""

    order: Tensor
    """[n, b, blocks]: the queries in ascending order; behind them n."""
    counts: Tensor
    """[b, blocks]: how many these are."""
    places: Tensor
    """[n, b, blocks + 1]: where the keys of a block begin in a query's list."""


def readers_of(picked: Tensor, s: int, block: int) -> tuple[Tensor, Readers]:
    """picked [n, b, count] -> the same in ascending order, with -1 first, and the readers of blocks of s keys. The host
    waits for nothing."""
    n, b, _ = picked.shape
    lists = picked.sort(-1).values
    blocks = triton.cdiv(s, block)
    edges = torch.arange(0, (blocks + 1) * block, block, dtype=torch.int32, device=picked.device)
    places = torch.searchsorted(lists, edges.expand(n, b, -1).contiguous(), out_int32=True)
    reads = places[..., 1:] > places[..., :-1]
    rows = torch.arange(n, dtype=torch.int32, device=picked.device)[:, None, None]
    order = torch.where(reads, rows, n).sort(0).values
    return lists, Readers(order, reads.sum(0, dtype=torch.int32), places)
