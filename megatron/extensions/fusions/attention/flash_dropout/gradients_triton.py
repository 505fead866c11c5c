"""Triton kernels of `kernel.py`, backward: gradients of queries by blocks of queries, those of keys and values by
blocks of keys. Each computes the scores and masks again, and adds up in one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.fusions.attention.flash_dropout.kernel_triton import (
    LOG2_E,
    SUBJECT,
    Mask,
    block_ranges,
    hash_rows,
    is_dropped,
    load_column_bits,
    load_rows,
    size_of,
    strides_of,
    widths_of,
)
from megatron.extensions.fusions.kernel_choice import as_runtime_errors

OF_QUERIES = {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (32, 32, 8, 1)}
"""Block of queries, block of keys, warps and stages by the width of heads: gradients of queries."""

OF_KEYS = {64: (32, 128, 8, 2), 128: (32, 64, 8, 2), 256: (32, 64, 8, 1)}
"""The same for the gradients of keys and values."""

ROWS = 64
"""Rows of a program that prepares the backward."""


@triton.jit(do_not_specialize=["key", "head_offset"])
def attention_prepare(  # type: ignore[no-untyped-def]
    grad,
    out,
    lse,
    scale_log2,
    delta,
    bits,
    sample_index,
    places,
    grad_row,
    grad_sample,
    grad_head,
    out_row,
    out_sample,
    out_head,
    lse_row,
    lse_sample,
    lse_head,
    n,
    heads,
    key,
    head_offset,
    V_WIDTH: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What both passes of the backward read of each row, [samples, heads, n]: log-sum-exp to base 2, infinite for rows
    without keys; the sum of grad * out; the hash."""
    start_n = tl.program_id(0) * BLOCK_N
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    i, dv = tl.arange(0, BLOCK_N), tl.arange(0, DV)
    in_i = start_n + i < n
    grad += sample.to(tl.int64) * grad_sample + head * grad_head
    out += sample.to(tl.int64) * out_sample + head * out_head
    g = load_rows(grad, start_n, grad_row, i, in_i, dv, V_WIDTH, True).to(tl.float32)
    o = load_rows(out, start_n, out_row, i, in_i, dv, V_WIDTH, True).to(tl.float32)
    lse += sample.to(tl.int64) * lse_sample + head * lse_head
    sums = tl.load(lse + (start_n + i).to(tl.int64) * lse_row, mask=in_i, other=0.0).to(tl.float32)
    sums = tl.where(sums == float("-inf"), float("inf"), sums * 1.4426950408889634)
    at = tl.program_id(1).to(tl.int64) * n + start_n + i
    tl.store(scale_log2 + at, sums, mask=in_i)
    tl.store(delta + at, tl.sum(g * o, 1), mask=in_i)
    row_bits = hash_rows(key, sample_index, sample, head_offset + head, places, start_n + i, in_i)
    tl.store(bits + at, row_bits.to(tl.int32, bitcast=True), mask=in_i)


@triton.jit
def _query_block(  # type: ignore[no-untyped-def]
    dq,
    q,
    grad,
    k,
    v,
    k_row,
    v_row,
    column_bits,
    row_bits,
    sums,
    delta,
    first,
    stop,
    start,
    m,
    to_log2,
    factor,
    threshold,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds one block of keys to the gradients of queries."""
    j = tl.arange(0, BLOCK_M)
    in_j = start + j < m
    keys = load_rows(k, start, k_row, j, in_j, tl.arange(0, D), WIDTH, MASKED)
    values = load_rows(v, start, v_row, j, in_j, tl.arange(0, DV), V_WIDTH, MASKED)
    weights = tl.exp2(tl.dot(q, tl.trans(keys), input_precision="ieee") * to_log2 - sums[:, None])
    if MASKED:
        place = (start + j)[None, :]
        weights = tl.where((place >= first[:, None]) & (place < stop[:, None]), weights, 0.0)
    dropped = is_dropped(row_bits[:, None] + load_column_bits(column_bits, start + j, in_j)[None, :], threshold)
    of_weights = tl.dot(grad, tl.trans(values), input_precision="ieee")
    of_scores = weights * (tl.where(dropped, 0.0, of_weights) * factor - delta[:, None])
    return tl.dot(of_scores.to(keys.dtype), keys, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["threshold"])
def attention_dq(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    grad,
    dq,
    scale_log2,
    delta,
    bits,
    bounds,
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
    grad_row,
    grad_sample,
    grad_head,
    samples,
    bounds_sample,
    bounds_stop,
    n,
    m,
    heads,
    of_group,
    scale,
    to_log2,
    factor,
    threshold,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dq [n, samples, heads, WIDTH]"""
    start_n = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_N
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    i, d, dv = tl.arange(0, BLOCK_N), tl.arange(0, D), tl.arange(0, DV)
    in_i = start_n + i < n
    q += sample.to(tl.int64) * q_sample + head * q_head
    grad += sample.to(tl.int64) * grad_sample + head * grad_head
    k += sample.to(tl.int64) * k_sample + head // of_group * k_head
    v += sample.to(tl.int64) * v_sample + head // of_group * v_head
    at = bounds + sample * bounds_sample + start_n + i
    first = tl.load(at, mask=in_i, other=0)
    stop = tl.load(at + bounds_stop, mask=in_i, other=0)
    row = tl.program_id(1).to(tl.int64) * n + start_n + i
    sums = tl.load(scale_log2 + row, mask=in_i, other=float("inf"))
    deltas = tl.load(delta + row, mask=in_i, other=0.0)
    row_bits = tl.load(bits + row, mask=in_i, other=0).to(tl.uint32, bitcast=True)
    queries = load_rows(q, start_n, q_row, i, in_i, d, WIDTH, True)
    grads = load_rows(grad, start_n, grad_row, i, in_i, dv, V_WIDTH, True)
    acc = tl.zeros([BLOCK_N, D], tl.float32)
    begin, full, full_end, before, behind = block_ranges(first, stop, in_i, m, BLOCK_M)
    for start in range(full, full_end, BLOCK_M):
        acc = _query_block(
            acc, queries, grads, k, v, k_row, v_row, column_bits, row_bits, sums, deltas, first, stop, start, m,
            to_log2, factor, threshold, WIDTH, V_WIDTH, D, DV, BLOCK_M, False,
        )  # fmt: skip
    for block in range(0, before + behind):
        start = tl.where(block < before, begin + block * BLOCK_M, full_end + (block - before) * BLOCK_M)
        acc = _query_block(
            acc, queries, grads, k, v, k_row, v_row, column_bits, row_bits, sums, deltas, first, stop, start, m,
            to_log2, factor, threshold, WIDTH, V_WIDTH, D, DV, BLOCK_M, True,
        )  # fmt: skip
    at = ((start_n + i).to(tl.int64) * samples + sample) * heads + head
    inside = in_i[:, None] & (d < WIDTH)[None, :]
    tl.store(dq + at[:, None] * WIDTH + d[None, :], (acc * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _key_block(  # type: ignore[no-untyped-def]
    dk,
    dv,
    keys,
    values,
    q,
    grad,
    q_row,
    grad_row,
    scale_log2,
    delta,
    bits,
    column_bits,
    first,
    stop,
    start,
    n,
    to_log2,
    factor,
    threshold,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds one block of queries to the gradients of keys and values. Scores are transposed: [keys, queries]."""
    i = tl.arange(0, BLOCK_N)
    in_i = start + i < n
    queries = load_rows(q, start, q_row, i, in_i, tl.arange(0, D), WIDTH, MASKED)
    grads = load_rows(grad, start, grad_row, i, in_i, tl.arange(0, DV), V_WIDTH, MASKED)
    sums = tl.load(scale_log2 + start + i, mask=in_i, other=float("inf"))
    deltas = tl.load(delta + start + i, mask=in_i, other=0.0)
    row_bits = tl.load(bits + start + i, mask=in_i, other=0).to(tl.uint32, bitcast=True)
    weights = tl.exp2(tl.dot(keys, tl.trans(queries), input_precision="ieee") * to_log2 - sums[None, :])
    if MASKED:
        place = (start + i)[None, :]
        weights = tl.where((place >= first[:, None]) & (place < stop[:, None]), weights, 0.0)
    dropped = is_dropped(column_bits[:, None] + row_bits[None, :], threshold)
    kept = tl.where(dropped, 0.0, weights).to(grads.dtype)
    dv = tl.dot(kept, grads, dv, input_precision="ieee")
    of_weights = tl.dot(values, tl.trans(grads), input_precision="ieee")
    of_scores = weights * (tl.where(dropped, 0.0, of_weights) * factor - deltas[None, :])
    dk = tl.dot(of_scores.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["threshold"])
def attention_dkdv(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    grad,
    dk,
    dv,
    scale_log2,
    delta,
    bits,
    bounds,
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
    grad_row,
    grad_sample,
    grad_head,
    samples,
    bounds_sample,
    bounds_stop,
    n,
    m,
    groups,
    of_group,
    scale,
    to_log2,
    factor,
    threshold,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dk [m, samples, groups, WIDTH] and dv [m, samples, groups, V_WIDTH], summed over the heads of a group in one
    order; `bounds` [2, 1 or samples, m] are those of keys."""
    start_m = tl.program_id(0) * BLOCK_M
    sample, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    j, d, c = tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, DV)
    in_j = start_m + j < m
    k += sample.to(tl.int64) * k_sample + group * k_head
    v += sample.to(tl.int64) * v_sample + group * v_head
    at = bounds + sample * bounds_sample + start_m + j
    first = tl.load(at, mask=in_j, other=0)
    stop = tl.load(at + bounds_stop, mask=in_j, other=0)
    keys = load_rows(k, start_m, k_row, j, in_j, d, WIDTH, True)
    values = load_rows(v, start_m, v_row, j, in_j, c, V_WIDTH, True)
    hashes = load_column_bits(column_bits, start_m + j, in_j)
    of_k = tl.zeros([BLOCK_M, D], tl.float32)
    of_v = tl.zeros([BLOCK_M, DV], tl.float32)
    begin, full, full_end, before, behind = block_ranges(first, stop, in_j, n, BLOCK_N)
    for head in range(group * of_group, (group + 1) * of_group):
        row = (sample * groups * of_group + head).to(tl.int64) * n
        q_at = q + sample.to(tl.int64) * q_sample + head * q_head
        grad_at = grad + sample.to(tl.int64) * grad_sample + head * grad_head
        for start in range(full, full_end, BLOCK_N):
            of_k, of_v = _key_block(
                of_k, of_v, keys, values, q_at, grad_at, q_row, grad_row, scale_log2 + row, delta + row, bits + row,
                hashes, first, stop, start, n, to_log2, factor, threshold, WIDTH, V_WIDTH, D, DV, BLOCK_N, False,
            )  # fmt: skip
        for block in range(0, before + behind):
            start = tl.where(block < before, begin + block * BLOCK_N, full_end + (block - before) * BLOCK_N)
            of_k, of_v = _key_block(
                of_k, of_v, keys, values, q_at, grad_at, q_row, grad_row, scale_log2 + row, delta + row, bits + row,
                hashes, first, stop, start, n, to_log2, factor, threshold, WIDTH, V_WIDTH, D, DV, BLOCK_N, True,
            )  # fmt: skip
    at = ((start_m + j).to(tl.int64) * samples + sample) * groups + group
    inside = in_j[:, None] & (d < WIDTH)[None, :]
    tl.store(dk + at[:, None] * WIDTH + d[None, :], (of_k * scale).to(dk.dtype.element_ty), mask=inside)
    inside = in_j[:, None] & (c < V_WIDTH)[None, :]
    tl.store(dv + at[:, None] * V_WIDTH + c[None, :], (of_v * factor).to(dv.dtype.element_ty), mask=inside)


def backward(
    rows: tuple[Tensor, Tensor, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    bounds: tuple[Tensor, Tensor],
    scale: float,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from those of the output, the output and the log-sum-exp; `bounds` of queries and of
    keys."""
    (grad, out, lse), (q, k, v) = rows, qkv
    (n, b, heads, _), (m, _, groups, _) = q.shape, v.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv)
    scale_log2, delta = (torch.empty(b, heads, n, dtype=torch.float32, device=q.device) for _ in range(2))
    bits = torch.empty(b, heads, n, dtype=torch.int32, device=q.device)
    widths, programs = widths_of(q, v), triton.cdiv(n, ROWS)
    strides = q.stride()[:3] + k.stride()[:3] + v.stride()[:3] + grad.stride()[:3]
    numbers = scale, scale * LOG2_E, mask.factor, mask.threshold
    with as_runtime_errors(SUBJECT):
        attention_prepare[(programs, b * heads)](
            *(grad, out, lse, scale_log2, delta, bits, mask.sample_index, mask.places),
            *(grad.stride()[:3] + out.stride()[:3] + lse.stride()),
            *(n, heads, mask.key, mask.head_offset, widths[1], widths[3], ROWS),
        )
        block_n, block_m, warps, stages = OF_KEYS[size_of(widths)]
        attention_dkdv[(triton.cdiv(m, block_m), b * groups)](
            *(q, k, v, grad, dk, dv, scale_log2, delta, bits, bounds[1], mask.column_bits),
            *strides,
            *(b, *strides_of(bounds[1]), n, m, groups, heads // groups, *numbers, *widths, block_n, block_m),
            num_warps=warps,
            num_stages=stages,
        )
        block_n, block_m, warps, stages = OF_QUERIES[size_of(widths)]
        attention_dq[(triton.cdiv(n, block_n), b * heads)](
            *(q, k, v, grad, dq, scale_log2, delta, bits, bounds[0], mask.column_bits),
            *strides,
            *(b, *strides_of(bounds[0]), n, m, heads, heads // groups, *numbers, *widths, block_n, block_m),
            num_warps=warps,
            num_stages=stages,
        )
    return dq, dk, dv
