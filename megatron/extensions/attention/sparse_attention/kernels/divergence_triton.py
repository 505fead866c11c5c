"""Triton kernels for the gradients of the indexer loss (`divergence.py`).

Each Triton program of the first kernel processes one query and all indexer heads. The program gathers the selected keys
of the query twice: first to compute the log-sum-exp of the indexer scores, then to compute the gradients of the query
and of the head weights. The products of keys and queries have the transposed layout [keys, heads], as in
`attention_triton.py`.

Key gradients are either accumulated in fp32 by atomic additions, whose order is arbitrary, or summed by a second
kernel. Each program of the second kernel processes a block of keys and visits the queries in ascending order. The
program multiplies each query by all keys of the block. The score gradients of keys that were not selected for the query
are zero.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.attention.sparse_attention.kernels.rows_triton import dot, end_of_list, load_rows

PARTS = 4
"""Number of Triton programs of the second kernel among which the queries are divided."""


class Blocks(NamedTuple):
    """Block sizes of the kernels."""

    listed: int = 64
    """Number of keys that a program of the first kernel gathers at once."""
    keys: int = 128
    """Number of keys per program of the second kernel."""
    columns: int = 64
    """Number of columns in each matrix product of a program of the second kernel. Each column is one head of one
    query."""


BLOCKS = Blocks()

SCAN = 1024
"""Number of list entries that a program reads at once while it searches for the end of a query's list."""


@triton.jit
def _listed(k, lists, at, count, samples, sample, WIDTH: tl.constexpr, HELD: tl.constexpr):
    """Load the keys at the positions `at` of a query's list. Return the indices of these keys, and the rows of `k` with
    these indices."""
    key = tl.load(lists + at, mask=at < count, other=-1)
    return key, load_rows(k, (key.to(tl.int64) * samples + sample) * WIDTH, key >= 0, 0, WIDTH, HELD)


@triton.jit
def _sums_of_list(
    k,
    lists,
    of_attention,
    queries,
    of_heads,
    end,
    sizes,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the log-sum-exp of the indexer scores and the sum of the attention weights of all keys in a query's
    list."""
    samples, sample, count = sizes
    # Each position within a block of keys has a separate sum, because a reduction over every block would synchronize
    # all threads.
    top = tl.full([KEYS], float("-inf"), tl.float32)
    total = tl.zeros([KEYS], tl.float32)
    mass = tl.zeros([KEYS], tl.float32)
    j = tl.arange(0, KEYS)
    for start in range(0, end, KEYS):
        key, rows = _listed(k, lists, start + j, count, samples, sample, WIDTH, HELD)
        products = tl.dot(rows, tl.trans(queries), input_precision="ieee")
        scores = tl.sum(tl.maximum(products, 0.0) * of_heads[None, :], 1)
        scores = tl.where(key >= 0, scores, float("-inf"))
        highest = tl.maximum(top, scores)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - base) + tl.exp(scores - base)
        mass += tl.load(of_attention + start + j, mask=key >= 0, other=0.0)
        top = highest
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    lse = base + tl.log(tl.maximum(tl.sum(total * tl.exp(top - base), 0), 1.1754943508222875e-38))
    return lse, tl.maximum(tl.sum(mass, 0), 1.1754943508222875e-38)


@triton.jit
def divergence_of_row(
    q,
    k,
    weights,
    picked,
    attended,
    found,
    dk,
    sizes,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Compute the loss of one query and the gradients of this loss. The inputs are q [n, b, heads, d], k [s, b, d],
    weights [n, b, heads], and picked and attended, both [n, b, count]. `found` contains four output tensors: the losses
    [n, b], the gradients of q, the gradients of weights, and the score gradients [n, b, keys]. The score gradients are
    None if the kernel adds key gradients to `dk` [keys, b, d]."""
    samples, heads, count, keys = sizes
    sums, dq, dw, dense = found
    sample = tl.program_id(1).to(tl.int64)
    # The programs that start first process the last rows, which have the most keys.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * samples + sample
    lists, of_attention = picked + row * count, attended + row * count
    h, j = tl.arange(0, HEADS), tl.arange(0, KEYS)
    in_h = h < heads
    queries = load_rows(q, (row * heads + h) * WIDTH, in_h, 0, WIDTH, HELD)
    of_heads = tl.load(weights + row * heads + h, mask=in_h, other=0.0).to(tl.float32)
    end = end_of_list(lists, count, SCAN)
    lse, of_all = _sums_of_list(
        k, lists, of_attention, queries, of_heads, end, (samples, sample, count), WIDTH, HELD, KEYS
    )
    loss = tl.zeros([KEYS], tl.float32)
    acc = tl.zeros([HELD, HEADS], tl.float32)
    of_weights = tl.zeros([HEADS], tl.float32)
    for start in range(0, end, KEYS):
        key, rows = _listed(k, lists, start + j, count, samples, sample, WIDTH, HELD)
        inside = key >= 0
        products = tl.maximum(tl.dot(rows, tl.trans(queries), input_precision="ieee"), 0.0)
        logs = tl.sum(products * of_heads[None, :], 1) - lse
        p = tl.load(of_attention + start + j, mask=inside, other=0.0) / of_all
        of_key = p * (tl.log(tl.where(p > 0.0, p, 1.0)) - logs)
        loss += tl.where(inside, of_key, 0.0)
        g = tl.where(inside, tl.exp(logs) - p, 0.0)
        of_weights += tl.sum(products * g[:, None], 0)
        ds = tl.where(products > 0.0, g[:, None] * of_heads[None, :], 0.0).to(rows.dtype)
        acc = dot(tl.trans(rows), ds, acc)
        if dense is not None:
            tl.store(dense + row * keys + key, g, mask=inside)
        if dk is not None:
            c = tl.arange(0, HELD)
            into = dk + ((key.to(tl.int64) * samples + sample) * WIDTH)[:, None] + c[None, :]
            of_keys = tl.dot(ds, queries, input_precision="ieee")
            tl.atomic_add(into, of_keys, mask=inside[:, None] & (c < WIDTH)[None, :], sem="relaxed")
    tl.store(sums + row, tl.sum(loss, 0))
    tl.store(dw + row * heads + h, of_weights.to(dw.dtype.element_ty), mask=in_h)
    c = tl.arange(0, HELD)
    into = dq + ((row * heads + h) * WIDTH)[None, :] + c[:, None]
    tl.store(into, acc.to(dq.dtype.element_ty), mask=in_h[None, :] & (c < WIDTH)[:, None])


@triton.jit
def divergence_of_keys(
    q,
    k,
    weights,
    dense,
    dk,
    sizes,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Sum the key gradients over the queries, in ascending order of queries.

    The queries are divided into contiguous parts. The kernel reads the score gradients `dense` [n, b, keys], and writes
    the fp32 sum of each part to dk [parts, keys, b, d].
    """
    n, samples, heads, count = sizes
    KEYS: tl.constexpr = BLOCKS[0]
    ROWS: tl.constexpr = BLOCKS[1]
    part = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    in_k = key < count
    at = (key.to(tl.int64) * samples + sample) * WIDTH
    keys = load_rows(k, at, in_k, 0, WIDTH, HELD)
    i, r = tl.arange(0, ROWS * HEADS), tl.arange(0, ROWS)
    h = i % HEADS
    acc = tl.zeros([KEYS, HELD], tl.float32)
    parts = tl.num_programs(1)
    for first in range(n * part // parts, n * (part + 1) // parts, ROWS):
        stop = n * (part + 1) // parts
        row = first + i // HEADS
        column = (row.to(tl.int64) * samples + sample) * heads + h
        inside = (row < stop) & (h < heads)
        queries = load_rows(q, column * WIDTH, inside, 0, WIDTH, HELD)
        of_heads = tl.load(weights + column, mask=inside, other=0.0).to(tl.float32)
        of_row = ((first + r).to(tl.int64) * samples + sample) * count
        g = tl.load(dense + of_row[None, :] + key[:, None], mask=in_k[:, None] & (first + r < stop)[None, :], other=0.0)
        g = tl.reshape(tl.broadcast_to(g[:, :, None], (KEYS, ROWS, HEADS)), (KEYS, ROWS * HEADS))
        products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        ds = tl.where(products > 0.0, g * of_heads[None, :], 0.0).to(keys.dtype)
        acc = dot(ds, queries, acc)
    c = tl.arange(0, HELD)
    into = dk + part.to(tl.int64) * count * samples * WIDTH + at[:, None] + c[None, :]
    tl.store(into, acc, mask=in_k[:, None] & (c < WIDTH)[None, :])


def warps_of(heads: int, adds: bool) -> int:
    """Return the number of warps per program of the first kernel. The number is chosen so that the sums that a program
    accumulates fit in registers."""
    return 8 if adds or heads > 16 else 4


def gradients_of_listed(
    q: Tensor, k: Tensor, weights: Tensor, picked: Tensor, attended: Tensor, keys: int, adds: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels; see `_gradients` in `divergence.py`."""
    (n, b, heads, width), count = q.shape, picked.shape[-1]
    sums = torch.empty(n, b, dtype=torch.float32, device=q.device)
    dq, dw = torch.empty_like(q), torch.empty_like(weights)
    dense = None if adds else torch.zeros(n, b, keys, dtype=torch.float32, device=q.device)
    dk = torch.zeros(keys, b, width, dtype=torch.float32, device=q.device) if adds else None
    held, of_heads = triton.next_power_of_2(max(16, width)), triton.next_power_of_2(max(16, heads))
    given = q, k, weights, picked, attended, (sums, dq, dw, dense), dk, (b, heads, count, keys), width, held, of_heads
    warps = warps_of(of_heads, adds)
    scan = min(SCAN, triton.next_power_of_2(count))
    divergence_of_row[(n, b)](*given, BLOCKS.listed, scan, num_warps=warps, num_stages=2)
    if dense is None or dk is not None:
        assert dk is not None
        return sums, dq, dw, dk
    parts = torch.empty(PARTS, keys, b, width, dtype=torch.float32, device=q.device)
    rows = max(1, BLOCKS.columns // of_heads)
    grid = triton.cdiv(keys, BLOCKS.keys), PARTS, b
    columns = q, k, weights, dense, parts, (n, b, heads, keys), width, held, of_heads, (BLOCKS.keys, rows)
    divergence_of_keys[grid](*columns, num_warps=8, num_stages=2)
    return sums, dq, dw, parts.sum(0)
