"""Triton kernels of `flash_dropout.py`.

In the forward pass, each program computes a block of queries for one sample and head. The backward pass has two
kernels. One kernel computes the query gradients, one block of queries at a time. The other kernel computes the key and
value gradients, one block of keys at a time. Each program recomputes the scores and masks, and sums in a fixed order.

The dropout mask costs eight integer operations per score: one addition, two shifts, two exclusive ORs, two
multiplications and one comparison.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.dropout import threshold
from megatron.extensions.speed.fusions.attention.flash_dropout import BandParts, fits
from megatron.extensions.speed.fusions.attention.row_blocks_triton import (
    Bounds,
    Rows,
    add_blocks,
    block_ranges,
    hash_rows,
    is_dropped,
    is_seen,
    load_bits,
    load_bounds,
    load_rows,
    of_head,
    store_rows,
)

LOG2_E = 1.4426950408889634

FORWARD = {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)}
"""Compilation settings of the forward pass for each head width: queries per block, keys per block, warps and pipeline
stages."""

OF_QUERIES = {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (32, 32, 8, 1)}
"""Compilation settings of the query gradient kernel, by head width: queries per block, keys per block, warps and
pipeline stages."""

OF_KEYS = {64: (32, 128, 8, 2), 128: (32, 64, 8, 2), 256: (32, 64, 8, 1)}
"""Compilation settings of the key and value gradient kernel, by head width: queries per block, keys per block, warps
and pipeline stages."""

ROWS = 64
"""Number of rows per program in the kernel that prepares the backward pass."""


@triton.jit
def _add_keys(sums, own, other, seen, start, numbers, WIDTHS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Add a block of keys to the online softmax of query rows. `sums` contains three running results for each row: the
    sum of the values times their attention weights after dropout, the sum of the weights before dropout, and the
    largest score."""
    acc, total, top = sums
    q, row_bits = own
    k, k_row, v, v_row, column_bits, m = other
    to_log2, _, limit = numbers
    j = tl.arange(0, BLOCK)
    in_j = start + j < m
    keys = load_rows(k, start, k_row, j, in_j, tl.arange(0, WIDTHS[2]), WIDTHS[0], MASKED)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * to_log2
    if MASKED:
        scores = tl.where(is_seen(seen, start + j), scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    dropped = is_dropped(row_bits[:, None] + load_bits(column_bits, start + j, in_j)[None, :], limit)
    values = load_rows(v, start, v_row, j, in_j, tl.arange(0, WIDTHS[3]), WIDTHS[1], MASKED)
    kept = tl.where(dropped, 0.0, weights).to(values.dtype)
    acc = tl.dot(kept, values, acc * shrink[:, None], input_precision="ieee")
    return acc, total, highest


@triton.jit
def _add_keys_to_gradients(
    sums, own, other, seen, start, numbers, WIDTHS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Add the contribution of one block of keys to the query gradients."""
    (dq,) = sums
    q, grad, lse, delta, row_bits = own
    k, k_row, v, v_row, column_bits, m = other
    to_log2, factor, limit = numbers
    j = tl.arange(0, BLOCK)
    in_j = start + j < m
    keys = load_rows(k, start, k_row, j, in_j, tl.arange(0, WIDTHS[2]), WIDTHS[0], MASKED)
    values = load_rows(v, start, v_row, j, in_j, tl.arange(0, WIDTHS[3]), WIDTHS[1], MASKED)
    weights = tl.exp2(tl.dot(q, tl.trans(keys), input_precision="ieee") * to_log2 - lse[:, None])
    if MASKED:
        weights = tl.where(is_seen(seen, start + j), weights, 0.0)
    dropped = is_dropped(row_bits[:, None] + load_bits(column_bits, start + j, in_j)[None, :], limit)
    of_weights = tl.dot(grad, tl.trans(values), input_precision="ieee")
    of_scores = weights * (tl.where(dropped, 0.0, of_weights) * factor - delta[:, None])
    return (tl.dot(of_scores.to(keys.dtype), keys, dq, input_precision="ieee"),)


@triton.jit
def _add_queries_to_gradients(
    sums, own, other, seen, start, numbers, WIDTHS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Add the contribution of one block of queries to the key and value gradients. In this function, scores have the
    shape [keys, queries]."""
    dk, dv = sums
    keys, values, column_bits = own
    q, q_row, grad, grad_row, lse, delta, bits, n = other
    to_log2, factor, limit = numbers
    i = tl.arange(0, BLOCK)
    in_i = start + i < n
    queries = load_rows(q, start, q_row, i, in_i, tl.arange(0, WIDTHS[2]), WIDTHS[0], MASKED)
    grads = load_rows(grad, start, grad_row, i, in_i, tl.arange(0, WIDTHS[3]), WIDTHS[1], MASKED)
    sums_of_rows = tl.load(lse + start + i, mask=in_i, other=float("inf"))
    deltas = tl.load(delta + start + i, mask=in_i, other=0.0)
    row_bits = load_bits(bits, start + i, in_i)
    weights = tl.exp2(tl.dot(keys, tl.trans(queries), input_precision="ieee") * to_log2 - sums_of_rows[None, :])
    if MASKED:
        weights = tl.where(is_seen(seen, start + i), weights, 0.0)
    dropped = is_dropped(column_bits[:, None] + row_bits[None, :], limit)
    kept = tl.where(dropped, 0.0, weights).to(grads.dtype)
    dv = tl.dot(kept, grads, dv, input_precision="ieee")
    of_weights = tl.dot(values, tl.trans(grads), input_precision="ieee")
    of_scores = weights * (tl.where(dropped, 0.0, of_weights) * factor - deltas[None, :])
    dk = tl.dot(of_scores.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["limit", "key", "head_offset"])
def attention_forward(
    q, k, v, out, lse, bounds, mask, sizes, factors, limit, key, head_offset, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Compute attention: q [n, samples, heads, d], k [m, samples, groups, d], v [m, samples, groups, dv] -> out [n,
    samples, heads, dv], lse [samples, heads, n]. Pass the result of `widths_of` as `WIDTHS`."""
    samples, n, m, heads, of_group = sizes
    sample_index, places, column_bits = mask
    # the last block of rows has the most keys, so the first program processes this block
    start_n = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCKS[0]
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    i = tl.arange(0, BLOCKS[0])
    in_i = start_n + i < n
    first, stop = load_bounds(bounds, sample, start_n + i, in_i)
    row_bits = hash_rows(key, sample_index, sample, head_offset + head, places, start_n + i, in_i)
    queries = load_rows(of_head(q, sample, head), start_n, q.row, i, in_i, tl.arange(0, WIDTHS[2]), WIDTHS[0], True)
    acc = tl.full([BLOCKS[0], WIDTHS[3]], 0.0, tl.float32)
    total = tl.full([BLOCKS[0]], 0.0, tl.float32)
    top = tl.full([BLOCKS[0]], float("-inf"), tl.float32)
    other = of_head(k, sample, head // of_group), k.row, of_head(v, sample, head // of_group), v.row, column_bits, m
    ranges = block_ranges(first, stop, in_i, m, BLOCKS[1])
    numbers = factors[0], factors[1], limit
    acc, total, top = add_blocks(
        _add_keys, (acc, total, top), (queries, row_bits), other, (first, stop), ranges, numbers, WIDTHS, BLOCKS[1]
    )
    result = acc * (factors[1] / tl.where(total == 0.0, 1.0, total))[:, None]
    row = (start_n + i).to(tl.int64) * samples + sample
    store_rows(out, result, row * heads + head, in_i, WIDTHS[1])
    found = tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + tl.program_id(1).to(tl.int64) * n + start_n + i, found, mask=in_i)


@triton.jit(do_not_specialize=["key", "head_offset"])
def attention_prepare(
    grad, out, lse, prepared, mask, n, heads, key, head_offset, WIDTHS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute three values for each query row, each of shape [samples, heads, n], for the two kernels of the backward
    pass. The values are the base-2 log-sum-exp (infinity for rows without keys), the sum of grad * out over channels,
    and the dropout hash."""
    sample_index, places, _ = mask
    scale_log2, delta, bits = prepared
    start_n = tl.program_id(0) * BLOCK_N
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    i, d = tl.arange(0, BLOCK_N), tl.arange(0, WIDTHS[3])
    in_i = start_n + i < n
    g = load_rows(of_head(grad, sample, head), start_n, grad.row, i, in_i, d, WIDTHS[1], True).to(tl.float32)
    o = load_rows(of_head(out, sample, head), start_n, out.row, i, in_i, d, WIDTHS[1], True).to(tl.float32)
    sums = of_head(lse, sample, head) + (start_n + i).to(tl.int64) * lse.row
    sums = tl.load(sums, mask=in_i, other=0.0).to(tl.float32)
    sums = tl.where(sums == float("-inf"), float("inf"), sums * 1.4426950408889634)
    at = tl.program_id(1).to(tl.int64) * n + start_n + i
    tl.store(scale_log2 + at, sums, mask=in_i)
    tl.store(delta + at, tl.sum(g * o, 1), mask=in_i)
    row_bits = hash_rows(key, sample_index, sample, head_offset + head, places, start_n + i, in_i)
    tl.store(bits + at, row_bits.to(tl.int32, bitcast=True), mask=in_i)


@triton.jit(do_not_specialize=["limit"])
def attention_dq(
    q, k, v, grad, dq, prepared, bounds, column_bits, sizes, factors, limit, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Compute the query gradients dq [n, samples, heads, d]."""
    samples, n, m, heads, of_group = sizes
    scale_log2, delta, bits = prepared
    start_n = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCKS[0]
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    i = tl.arange(0, BLOCKS[0])
    in_i = start_n + i < n
    first, stop = load_bounds(bounds, sample, start_n + i, in_i)
    row = tl.program_id(1).to(tl.int64) * n + start_n + i
    sums = tl.load(scale_log2 + row, mask=in_i, other=float("inf"))
    deltas = tl.load(delta + row, mask=in_i, other=0.0)
    row_bits = load_bits(bits, row, in_i)
    d, dv = tl.arange(0, WIDTHS[2]), tl.arange(0, WIDTHS[3])
    queries = load_rows(of_head(q, sample, head), start_n, q.row, i, in_i, d, WIDTHS[0], True)
    grads = load_rows(of_head(grad, sample, head), start_n, grad.row, i, in_i, dv, WIDTHS[1], True)
    own = queries, grads, sums, deltas, row_bits
    other = of_head(k, sample, head // of_group), k.row, of_head(v, sample, head // of_group), v.row, column_bits, m
    ranges = block_ranges(first, stop, in_i, m, BLOCKS[1])
    numbers = factors[0], factors[1], limit
    acc = tl.full([BLOCKS[0], WIDTHS[2]], 0.0, tl.float32)
    (acc,) = add_blocks(_add_keys_to_gradients, (acc,), own, other, (first, stop), ranges, numbers, WIDTHS, BLOCKS[1])
    at = ((start_n + i).to(tl.int64) * samples + sample) * heads + head
    store_rows(dq, acc * factors[2], at, in_i, WIDTHS[0])


@triton.jit(do_not_specialize=["limit"])
def attention_dkdv(
    q,
    k,
    v,
    grad,
    dk,
    dv,
    prepared,
    bounds,
    column_bits,
    sizes,
    factors,
    limit,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute dk [m, samples, groups, d] and dv [m, samples, groups, dv], summed over the heads of a group in a fixed
    order. `bounds` holds, for each key, the range of queries that attend to the key."""
    samples, n, m, groups, of_group = sizes
    scale_log2, delta, bits = prepared
    start_m = tl.program_id(0) * BLOCKS[1]
    sample, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    j = tl.arange(0, BLOCKS[1])
    in_j = start_m + j < m
    first, stop = load_bounds(bounds, sample, start_m + j, in_j)
    d, c = tl.arange(0, WIDTHS[2]), tl.arange(0, WIDTHS[3])
    keys = load_rows(of_head(k, sample, group), start_m, k.row, j, in_j, d, WIDTHS[0], True)
    values = load_rows(of_head(v, sample, group), start_m, v.row, j, in_j, c, WIDTHS[1], True)
    own = keys, values, load_bits(column_bits, start_m + j, in_j)
    ranges = block_ranges(first, stop, in_j, n, BLOCKS[0])
    numbers = factors[0], factors[1], limit
    of_k = tl.full([BLOCKS[1], WIDTHS[2]], 0.0, tl.float32)
    of_v = tl.full([BLOCKS[1], WIDTHS[3]], 0.0, tl.float32)
    for head in range(group * of_group, (group + 1) * of_group):
        row = (sample * groups * of_group + head).to(tl.int64) * n
        q_at, grad_at = of_head(q, sample, head), of_head(grad, sample, head)
        other = q_at, q.row, grad_at, grad.row, scale_log2 + row, delta + row, bits + row, n
        of_k, of_v = add_blocks(
            _add_queries_to_gradients, (of_k, of_v), own, other, (first, stop), ranges, numbers, WIDTHS, BLOCKS[0]
        )
    at = ((start_m + j).to(tl.int64) * samples + sample) * groups + group
    store_rows(dk, of_k * factors[2], at, in_j, WIDTHS[0])
    store_rows(dv, of_v * factors[1], at, in_j, WIDTHS[1])


class Settings(NamedTuple):
    """Arguments of the attention operators other than queries, keys, values and gradients."""

    of_queries: Tensor
    """Start and end of each query's key range, [2, 1 or b, n] int32. `of_keys` holds the start and end of each key's
    query range, [2, 1 or b, m]."""
    of_keys: Tensor
    places: Tensor
    """Positions of the queries, [n] int32."""
    column_bits: Tensor
    """Dropout hash of each key position, [m] int32."""
    scale: float
    p: float
    """Dropout probability of attention weights."""
    key: int
    head_offset: int
    sample_index: Tensor
    """Global indices of the samples, [b] int64."""

    @property
    def mask(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.sample_index, self.places, self.column_bits

    @property
    def factors(self) -> tuple[float, float, float]:
        """Return three factors: the score scale for exponentials of base 2, the factor 1 / (1 - p) of attention weights
        that dropout keeps, and the score scale."""
        return self.scale * LOG2_E, 1 / (1 - self.p), self.scale

    @property
    def limit(self) -> int:
        """Return the dropout threshold. A query-key pair is dropped if its hash is below this threshold."""
        return threshold(self.p)


def check(q: Tensor, v: Tensor) -> None:
    """Raise RuntimeError for operands that the kernels do not support."""
    if torch.cuda.get_device_capability(q.device) < (8, 0) or not fits(q.dtype, q.shape[-1], v.shape[-1]):
        raise RuntimeError(f"no kernel for head widths {q.shape[-1]} and {v.shape[-1]} in {q.dtype} on this GPU")


def flash_dropout(q: Tensor, k: Tensor, v: Tensor, *settings: *BandParts) -> tuple[Tensor, Tensor]:
    """Compute the attention output [n, b, heads, dv] and the log-sum-exp [n, b, heads].

    Args:
        q: Queries [n, b, heads, d].
        k: Keys [m, b, groups, d].
        v: Values [m, b, groups, dv].
        settings: Values of the fields of `Settings`, in order.
    """
    check(q, v)
    own = Settings(*settings)
    (n, b, heads, _), (m, _, groups, width) = q.shape, v.shape
    out = torch.empty(n, b, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, heads, n, dtype=torch.float32, device=q.device)
    sizes = b, n, m, heads, heads // groups
    given = *map(Rows.of, (q, k, v)), out, lse, Bounds.of(own.of_queries), own.mask, sizes, own.factors, own.limit
    blocks = FORWARD[size_of(widths_of(q, v))]
    grid = triton.cdiv(n, blocks[0]), b * heads
    _launch(attention_forward, grid, (*given, own.key, own.head_offset, widths_of(q, v)), blocks)
    return out, lse.permute(2, 0, 1)


def flash_dropout_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *settings: *BandParts
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    Args:
        grad: Output gradient.
        out: Output.
        lse: Log-sum-exp.
        q: Queries.
        k: Keys.
        v: Values.
        settings: Values of the fields of `Settings`, in order.
    """
    check(q, v)
    own, widths = Settings(*settings), widths_of(q, v)
    (n, b, heads, _), (m, _, groups, _) = q.shape, v.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    scale_log2, delta = (torch.empty(b, heads, n, dtype=torch.float32, device=q.device) for _ in range(2))
    prepared = scale_log2, delta, torch.empty(b, heads, n, dtype=torch.int32, device=q.device)
    of_rows = *map(Rows.of, (grad, out, lse)), prepared, own.mask, n, heads, own.key, own.head_offset, widths
    attention_prepare[(triton.cdiv(n, ROWS), b * heads)](*of_rows, ROWS)
    given, per = tuple(map(Rows.of, (q, k, v, grad))), heads // groups
    blocks, rest = OF_KEYS[size_of(widths)], (own.column_bits, (b, n, m, groups, per), own.factors, own.limit, widths)
    of_keys = *given, dk, dv, prepared, Bounds.of(own.of_keys), *rest
    _launch(attention_dkdv, (triton.cdiv(m, blocks[1]), b * groups), of_keys, blocks)
    blocks, rest = OF_QUERIES[size_of(widths)], (own.column_bits, (b, n, m, heads, per), own.factors, own.limit, widths)
    of_queries = *given, dq, prepared, Bounds.of(own.of_queries), *rest
    _launch(attention_dq, (triton.cdiv(n, blocks[0]), b * heads), of_queries, blocks)
    return dq, dk, dv


def _launch(
    kernel: triton.JITFunction, grid: tuple[int, int], operands: tuple[object, ...], blocks: tuple[int, int, int, int]
) -> None:
    *sizes, warps, stages = blocks
    kernel[grid](*operands, tuple(sizes), num_warps=warps, num_stages=stages)


def widths_of(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Return four widths: the head widths of queries and values, and the same two widths rounded up to powers of
    two."""
    width, value_width = q.shape[-1], v.shape[-1]
    return width, value_width, max(16, triton.next_power_of_2(width)), max(16, triton.next_power_of_2(value_width))


def size_of(widths: tuple[int, int, int, int]) -> int:
    return max(64, *widths[2:])
