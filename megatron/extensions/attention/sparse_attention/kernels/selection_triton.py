"""Triton kernels that compute the indexer scores and select the keys with the largest scores (`selection.py`).

Each Triton program of the score kernel loads a block of keys and processes the queries one by one. For each query, the
program multiplies the keys by the query vectors of all indexer heads, applies ReLU and the head weights, and sums over
heads without storing the products. Each program of the selection kernel processes one query. The program determines the
smallest selected score digit by digit, starting from the most significant digit (radix select), and then lists the
selected keys.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS, QUERIES = 128, 16
"""Block sizes of the score kernel: the number of keys and the number of queries per program."""

PLACES = 1024
"""Number of scores that the selection kernel reads at once."""


@triton.jit
def score_keys(
    q, k, weights, out, sizes, WIDTH: tl.constexpr, HELD: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Compute the indexer scores `out` [n, b, keys] from q [n, b, heads, d], k [keys, b, d] and weights [n, b,
    heads]."""
    n, samples, heads, count = sizes
    KEYS: tl.constexpr = BLOCKS[0]
    sample = tl.program_id(2).to(tl.int64)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    c, in_k = tl.arange(0, HELD), key < count
    at = (key.to(tl.int64) * samples + sample) * WIDTH
    keys = tl.load(k + at[:, None] + c[None, :], mask=in_k[:, None] & (c < WIDTH)[None, :], other=0.0)
    first = tl.program_id(1) * BLOCKS[1]
    for step in range(0, tl.minimum(BLOCKS[1], n - first)):
        row = (first + step).to(tl.int64) * samples + sample
        before = row * heads
        total = tl.zeros([KEYS], tl.float32)
        for start in range(0, heads, HEADS):
            h = start + tl.arange(0, HEADS)
            mask = (h < heads)[:, None] & (c < WIDTH)[None, :]
            queries = tl.load(q + (before + h)[:, None] * WIDTH + c[None, :], mask=mask, other=0.0)
            of_heads = tl.load(weights + before + h, mask=h < heads, other=0.0).to(tl.float32)
            products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            total += tl.sum(tl.maximum(products, 0.0) * of_heads[None, :], 1)
        tl.store(out + row * count + key, total, mask=in_k)


@triton.jit
def _ordered(x):
    """Map fp32 numbers to uint32 numbers that have the same order. Positive and negative zero are mapped to the same
    number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, tl.full([], -1, tl.int32), tl.full([], -(2**31), tl.int32))
    return (bits ^ flipped).to(tl.uint32, bitcast=True)


@triton.jit
def select_largest(scores, first, last, out, sizes, bound_rows, bound_samples, PLACES: tl.constexpr):
    """List the indices of the keys with the largest scores, in ascending order of the indices. Among keys with equal
    scores, later keys are preferred.

    The inputs are scores [n, b, keys] and the first and last key [n, 1 or b] that each query may attend to. The output
    is out [n, b, topk]. If a query may attend to fewer than topk keys, the list is padded with -1. Let `behind` be the
    number of keys after the last key that the query may attend to. At most `behind` entries of padding are placed at
    the end of the list. The rest of the padding is placed at the start.
    """
    samples, count, topk = sizes
    row, sample = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    bound = row * bound_rows + sample * bound_samples
    low = tl.maximum(tl.load(first + bound), 0).to(tl.int32)
    high = tl.minimum(tl.load(last + bound), count - 1).to(tl.int32)
    seen = tl.maximum(high - low + 1, 0)
    own = scores + (row * samples + sample) * count
    into = out + (row * samples + sample) * topk
    i = tl.arange(0, PLACES)
    digits = tl.arange(0, 256)
    # `prefix` contains the leading digits of the smallest selected score. `wanted` is the number of selected scores
    # that begin with these digits.
    prefix = tl.full([], 0, tl.uint32)
    wanted = tl.minimum(topk, seen)
    equal = seen
    if seen > topk:
        for step in tl.static_range(4):
            counts = tl.zeros([256], tl.int32)
            for start in range(low, high + 1, PLACES):
                inside = start + i <= high
                x = _ordered(tl.load(own + start + i, mask=inside, other=0.0))
                alike = inside
                if step > 0:
                    alike = inside & ((x >> (32 - 8 * step)) == prefix)
                digit = ((x >> (24 - 8 * step)) & 255).to(tl.int32)
                counts += tl.histogram(digit, 256, mask=alike)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            found = tl.sum((above >= wanted).to(tl.int32), 0)
            wanted -= tl.sum(tl.where(digits == found, above, 0), 0)
            equal = tl.sum(tl.where(digits == found, counts, 0), 0)
            prefix = (prefix << 8) | found.to(tl.uint32)
    behind = tl.minimum(topk - tl.minimum(topk, seen), count - 1 - high)
    before = topk - tl.minimum(topk, seen) - behind
    for start in range(0, topk, PLACES):
        hole = (start + i < before) | ((start + i >= topk - behind) & (start + i < topk))
        tl.store(into + start + i, tl.full([PLACES], -1, tl.int32), mask=hole)
    listed = before
    passed = 0
    for start in range(low, high + 1, PLACES):
        inside = start + i <= high
        x = _ordered(tl.load(own + start + i, mask=inside, other=0.0))
        same = inside & (x == prefix)
        number = passed + tl.cumsum(same.to(tl.int32), 0)
        chosen = inside & (x > prefix) | (same & (number > equal - wanted))
        if seen <= topk:
            chosen = inside
        place = listed + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(into + place, start + i, mask=chosen)
        listed += tl.sum(chosen.to(tl.int32), 0)
        passed += tl.sum(same.to(tl.int32), 0)


def scores_of_keys(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Launch the score kernel; see `_scores` in `selection.py`."""
    n, b, heads, width = q.shape
    out = torch.empty(n, b, k.shape[0], dtype=torch.float32, device=q.device)
    held, of_heads = triton.next_power_of_2(max(16, width)), min(64, triton.next_power_of_2(max(16, heads)))
    grid = triton.cdiv(k.shape[0], KEYS), triton.cdiv(n, QUERIES), b
    sizes = n, b, heads, k.shape[0]
    score_keys[grid](q, k, weights, out, sizes, width, held, of_heads, (KEYS, QUERIES), num_warps=8, num_stages=2)
    return out


def largest_scores(scores: Tensor, first: Tensor, last: Tensor, topk: int) -> Tensor:
    """Launch the selection kernel; see `_largest` in `selection.py`."""
    n, b, count = scores.shape
    out = torch.empty(n, b, topk, dtype=torch.int32, device=scores.device)
    strides = first.stride(0), first.stride(1) if first.shape[1] > 1 else 0
    select_largest[(n, b)](scores, first, last, out, (b, count, topk), *strides, PLACES=PLACES, num_warps=4)
    return out
