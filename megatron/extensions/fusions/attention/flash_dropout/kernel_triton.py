"""Triton kernel of `kernel.py`, forward: a program computes a block of queries in one sample and head.

A band bounds the loop over the other side: blocks that every row of the program sees whole are taken without a mask,
those at both ends of the range with one. The mask of dropout costs eight integer operations a score: an addition, two
shifts, two exclusive ors, two products and a comparison.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.fusions.kernel_choice import as_runtime_errors

SUBJECT = "attention with dropout"
LOG2_E = 1.4426950408889634

FORWARD = {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)}
"""Block of queries, block of keys, warps and stages by the width of heads."""


class Mask(NamedTuple):
    """Dropout, and the positions that its masks follow from."""

    factor: float
    """Of what is kept."""
    threshold: int
    """Hashes below it are dropped."""
    key: int
    head_offset: int
    sample_index: Tensor
    """[b] int64"""
    places: Tensor
    """[n] int32: positions of the queries."""
    column_bits: Tensor
    """[m] int32: hashes of the positions of the keys."""


@triton.jit
def _absorb(state, value):  # type: ignore[no-untyped-def]
    """`megatron.core.dropout._absorb` on uint64."""
    x = value.to(tl.uint64) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64) + state
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def hash_rows(key, sample_index, sample, head, places, i, in_i):  # type: ignore[no-untyped-def]
    """Hashes of the rows i of a head, uint32."""
    state = _absorb(key.to(tl.uint64), tl.load(sample_index + sample))
    rows = _absorb(_absorb(state, head), tl.load(places + i, mask=in_i, other=0))
    return rows.to(tl.uint32) + tl.full([], 0x80000000, tl.uint32)


@triton.jit
def is_dropped(bits, threshold):  # type: ignore[no-untyped-def]
    """Whether pairs are dropped, by the sums of the hashes of their rows and columns, uint32."""
    bits = (bits ^ (bits >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    bits = (bits ^ (bits >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return bits.to(tl.int32, bitcast=True) < threshold


@triton.jit
def load_column_bits(column_bits, j, in_j):  # type: ignore[no-untyped-def]
    return tl.load(column_bits + j, mask=in_j, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def load_rows(x, start, stride, i, in_i, d, WIDTH: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows start + i of x [., WIDTH]: zeros where in_i is false, and in channels beyond WIDTH."""
    at = x + tl.full([], 1, tl.int64) * start * stride + i[:, None] * stride + d[None, :]
    if MASKED or d.shape[0] != WIDTH:
        return tl.load(at, mask=in_i[:, None] & (d < WIDTH)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def block_ranges(first, stop, inside, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """For rows that see the ranges [first, stop): where the first block begins, where those begin and end that every
    row sees whole, and the number of the others before and behind them."""
    begin = tl.min(tl.where(inside, first, size)) // BLOCK * BLOCK
    end = tl.maximum(tl.max(tl.where(inside, stop, 0)), begin)
    end = begin + (end - begin + BLOCK - 1) // BLOCK * BLOCK
    full = (tl.max(tl.where(inside, first, 0)) + BLOCK - 1) // BLOCK * BLOCK
    full = tl.minimum(full, end)
    full_end = tl.maximum(tl.min(tl.where(inside, stop, size)) // BLOCK * BLOCK, full)
    return begin, full, full_end, (full - begin) // BLOCK, (end - full_end) // BLOCK


@triton.jit
def _forward_block(  # type: ignore[no-untyped-def]
    acc,
    total,
    top,
    q,
    k,
    v,
    k_row,
    v_row,
    column_bits,
    row_bits,
    first,
    stop,
    start,
    m,
    to_log2,
    threshold,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds one block of keys to the sums of rows: acc of dropped weights times values, total of weights."""
    j = tl.arange(0, BLOCK_M)
    in_j = start + j < m
    keys = load_rows(k, start, k_row, j, in_j, tl.arange(0, D), WIDTH, MASKED)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * to_log2
    if MASKED:
        place = (start + j)[None, :]
        scores = tl.where((place >= first[:, None]) & (place < stop[:, None]), scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    dropped = is_dropped(row_bits[:, None] + load_column_bits(column_bits, start + j, in_j)[None, :], threshold)
    values = load_rows(v, start, v_row, j, in_j, tl.arange(0, DV), V_WIDTH, MASKED)
    kept = tl.where(dropped, 0.0, weights).to(values.dtype)
    acc = tl.dot(kept, values, acc * shrink[:, None], input_precision="ieee")
    return acc, total, highest


@triton.jit(do_not_specialize=["key", "head_offset", "threshold"])
def attention_forward(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    lse,
    bounds,
    sample_index,
    places,
    column_bits,
    q_row,
    q_sample,
    q_head,
    k_row,
    k_sample,
    k_head,
    v_row,
    v_sample,
    v_head,
    samples,
    bounds_sample,
    bounds_stop,
    n,
    m,
    heads,
    of_group,
    to_log2,
    factor,
    threshold,
    key,
    head_offset,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """q [n, samples, heads, WIDTH], k [m, samples, groups, WIDTH], v [m, samples, groups, V_WIDTH] and `bounds`
    [2, 1 or samples, n] -> out [n, samples, heads, V_WIDTH], lse [samples, heads, n]."""
    start_n = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_N  # those that see the most come first
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    i, d, dv = tl.arange(0, BLOCK_N), tl.arange(0, D), tl.arange(0, DV)
    in_i = start_n + i < n
    q += sample.to(tl.int64) * q_sample + head * q_head
    k += sample.to(tl.int64) * k_sample + head // of_group * k_head
    v += sample.to(tl.int64) * v_sample + head // of_group * v_head
    at = bounds + sample * bounds_sample + start_n + i
    first = tl.load(at, mask=in_i, other=0)
    stop = tl.load(at + bounds_stop, mask=in_i, other=0)
    row_bits = hash_rows(key, sample_index, sample, head_offset + head, places, start_n + i, in_i)
    queries = load_rows(q, start_n, q_row, i, in_i, d, WIDTH, True)
    acc = tl.zeros([BLOCK_N, DV], tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    top = tl.full([BLOCK_N], float("-inf"), tl.float32)
    begin, full, full_end, before, behind = block_ranges(first, stop, in_i, m, BLOCK_M)
    for start in range(full, full_end, BLOCK_M):
        acc, total, top = _forward_block(
            acc, total, top, queries, k, v, k_row, v_row, column_bits, row_bits, first, stop, start, m, to_log2,
            threshold, WIDTH, V_WIDTH, D, DV, BLOCK_M, False,
        )  # fmt: skip
    for block in range(0, before + behind):
        start = tl.where(block < before, begin + block * BLOCK_M, full_end + (block - before) * BLOCK_M)
        acc, total, top = _forward_block(
            acc, total, top, queries, k, v, k_row, v_row, column_bits, row_bits, first, stop, start, m, to_log2,
            threshold, WIDTH, V_WIDTH, D, DV, BLOCK_M, True,
        )  # fmt: skip
    result = acc * (factor / tl.where(total == 0.0, 1.0, total))[:, None]
    row = (start_n + i).to(tl.int64) * samples + sample
    at = out + (row * heads + head)[:, None] * V_WIDTH + dv[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=in_i[:, None] & (dv < V_WIDTH)[None, :])
    found = tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + tl.program_id(1).to(tl.int64) * n + start_n + i, found, mask=in_i)


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor]:
    """Output [n, b, heads, dv] and log-sum-exp [n, b, heads]; bounds [2, 1 or b, n] int32."""
    (n, b, heads, _), (m, _, groups, width) = q.shape, v.shape
    out = torch.empty(n, b, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, heads, n, dtype=torch.float32, device=q.device)
    widths = widths_of(q, v)
    block_n, block_m, warps, stages = FORWARD[size_of(widths)]
    with as_runtime_errors(SUBJECT):
        attention_forward[(triton.cdiv(n, block_n), b * heads)](
            *(q, k, v, out, lse, bounds, mask.sample_index, mask.places, mask.column_bits),
            *(q.stride()[:3] + k.stride()[:3] + v.stride()[:3]),
            *(b, *strides_of(bounds), n, m, heads, heads // groups, scale * LOG2_E, mask.factor, mask.threshold),
            *(mask.key, mask.head_offset, *widths, block_n, block_m),
            num_warps=warps,
            num_stages=stages,
        )
    return out, lse.permute(2, 0, 1)


def widths_of(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Channels of queries and of values, and the powers of two that hold them."""
    width, value_width = q.shape[-1], v.shape[-1]
    return width, value_width, max(16, triton.next_power_of_2(width)), max(16, triton.next_power_of_2(value_width))


def size_of(widths: tuple[int, int, int, int]) -> int:
    return max(64, *widths[2:])


def strides_of(bounds: Tensor) -> tuple[int, int]:
    """Numbers from one sample's bounds to the next one's, 0 where all samples are alike; and from the first rows to
    those behind the last."""
    return bounds.shape[2] if bounds.shape[1] > 1 else 0, bounds.stride(0)
