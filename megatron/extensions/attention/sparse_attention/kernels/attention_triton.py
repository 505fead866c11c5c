"""Triton kernels for attention to selected keys (`attention.py`).

Each Triton program processes a group of heads for one query token of one sample. The program gathers blocks of the keys
in the query's list, and multiplies each block by all heads of the group. Scores have the transposed layout [keys,
heads], so the rows of matrix products are keys or channels, and 16 heads suffice to fill the tensor cores. The value
channels are divided into four slices, so that the gradients of one slice fit in registers.

Key gradients are either accumulated in fp32 by atomic additions, whose order is arbitrary, or summed in a second pass
(`key_sums_triton.py`). For the second pass, the backward kernel stores the attention weights and the score gradients of
the keys in each query's list.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.attention.sparse_attention.kernels.attention import MOST_BYTES
from megatron.extensions.attention.sparse_attention.kernels.key_sums_triton import PARTS, Tile, sum_of_keys_
from megatron.extensions.attention.sparse_attention.kernels.rows_triton import (
    Blocks,
    Widths,
    add_rows,
    dot,
    end_of_list,
    load_rest,
    load_values,
    place_of,
    products,
    scaled,
    scores_of,
    store_heads,
    store_values,
)
from megatron.extensions.speed.fusions.attention.row_blocks_triton import Rows

LOG2_E = 1.4426950408889634


@triton.jit
def _log2_sum(a, b):
    """Return log2(2^a + 2^b); a may be -infinity."""
    top = tl.maximum(a, b)
    return top + tl.log2(tl.exp2(a - top) + tl.exp2(b - top))


@triton.jit
def selected_forward(
    q, k, picked, sinks, out, sums, sizes, to_log2, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr, SCAN: tl.constexpr
):
    """Compute attention to the keys in each query's list `picked`.

    The inputs are q [n, b, heads, w], k [s, b, w], picked [n, b, count] and sinks [heads] or None. The outputs are out
    [n, b, heads, values], and three tensors [n, b, heads] in `sums`: the log-sum-exps of the scores of all listed keys,
    the log-sum-exps of the scores of listed keys in the first key set, and the largest score.
    """
    samples, heads, count, first = sizes
    PART: tl.constexpr = WIDTHS[2]
    HEADS: tl.constexpr = BLOCKS[0]
    KEYS: tl.constexpr = BLOCKS[1]
    row, sample, h, in_h, before = place_of(samples, heads, HEADS)
    lists = picked + (row * samples + sample) * count
    of_row = row * q.row + sample * q.sample + h * q.head
    queries = load_values(q.data, of_row, in_h, WIDTHS)
    of_queries = load_rest(q.data, of_row, in_h, queries, WIDTHS)
    zeros = tl.zeros([PART, HEADS], tl.float32)
    acc = (zeros, zeros, zeros, zeros)
    total = tl.zeros([HEADS], tl.float32)
    of_first = tl.zeros([HEADS], tl.float32)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    j = tl.arange(0, KEYS)
    for start in range(0, end_of_list(lists, count, SCAN), KEYS):
        key = tl.load(lists + start + j, mask=start + j < count, other=-1)
        at = (key.to(tl.int64) * samples + sample) * (WIDTHS[0] + WIDTHS[1])
        keys = load_values(k, at, key >= 0, WIDTHS)
        scores = scores_of(keys, load_rest(k, at, key >= 0, keys, WIDTHS), queries, of_queries, WIDTHS) * to_log2
        scores = tl.where((key >= 0)[:, None], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[None, :])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 0)
        of_first = of_first * shrink + tl.sum(tl.where((start + j < first)[:, None], weights, 0.0), 0)
        acc = add_rows(scaled(acc, shrink), keys, weights.to(keys[0].dtype))
        top = highest
    lse, lse_first = top + tl.log2(total), top + tl.log2(of_first)
    if sinks is not None:
        of_sinks = tl.load(sinks + h, mask=in_h, other=0.0).to(tl.float32) * 1.4426950408889634
        lse, lse_first = _log2_sum(lse, of_sinks), _log2_sum(lse_first, of_sinks)
    factors = tl.where(top == float("-inf"), 0.0, tl.exp2(top - lse))
    store_values(out, scaled(acc, factors), before, h, in_h, WIDTHS, WIDTHS[0])
    tl.store(sums[0] + before + h, lse * 0.6931471805599453, mask=in_h)
    tl.store(sums[1] + before + h, lse_first * 0.6931471805599453, mask=in_h)
    tl.store(sums[2] + before + h, top * 0.6931471805599453, mask=in_h)


@triton.jit
def _add_to_keys(dk, at, inside, values, start: tl.constexpr, size: tl.constexpr):
    """Add `values` [keys, HELD] atomically to the channels from `start` to `start + size` of rows of dk. The offsets
    `at` are the starts of these rows."""
    c = tl.arange(0, values.shape[1])
    where = dk + at[:, None] + (start + c)[None, :]
    tl.atomic_add(where, values, mask=inside[:, None] & (c < size)[None, :], sem="relaxed")


@triton.jit
def _of_keys(ds, queries, p, grads):
    """Return the gradients [keys, PART] of a slice of the key channels that also serve as values. Each gradient is the
    sum of the gradient as a key channel and the gradient as a value channel."""
    return dot(p, grads, tl.dot(ds, queries, input_precision="ieee"))


@triton.jit
def _add_gradients(dk, at, inside, ds, queries, of_queries, p, grads, WIDTHS: tl.constexpr):
    """Compute the gradients of all key channels, and add the gradients atomically to dk."""
    VALUES: tl.constexpr = WIDTHS[0]
    PART: tl.constexpr = WIDTHS[2]
    _add_to_keys(dk, at, inside, _of_keys(ds, queries[0], p, grads[0]), 0, VALUES)
    _add_to_keys(dk, at, inside, _of_keys(ds, queries[1], p, grads[1]), PART, VALUES - PART)
    _add_to_keys(dk, at, inside, _of_keys(ds, queries[2], p, grads[2]), 2 * PART, VALUES - 2 * PART)
    _add_to_keys(dk, at, inside, _of_keys(ds, queries[3], p, grads[3]), 3 * PART, VALUES - 3 * PART)
    if WIDTHS[3]:
        _add_to_keys(dk, at, inside, tl.dot(ds, of_queries, input_precision="ieee"), VALUES, WIDTHS[1])


@triton.jit
def selected_backward(
    q,
    k,
    picked,
    grad,
    lse,
    delta,
    dq,
    dk,
    kept,
    sizes,
    scale,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Compute the query gradients dq [n, b, heads, w], and add the key gradients to dk [s, b, w]. If `dk` is None, the
    attention weights and the score gradients of the keys in `picked` are instead stored in the two tensors `kept` [n,
    b, count, heads]. The input `delta` [n, b, heads] is the sum of grad * out over channels."""
    samples, heads, count = sizes
    VALUES: tl.constexpr = WIDTHS[0]
    PART: tl.constexpr = WIDTHS[2]
    WIDTH: tl.constexpr = WIDTHS[0] + WIDTHS[1]
    HEADS: tl.constexpr = BLOCKS[0]
    KEYS: tl.constexpr = BLOCKS[1]
    row, sample, h, in_h, before = place_of(samples, heads, HEADS)
    lists = picked + (row * samples + sample) * count
    of_row = row * q.row + sample * q.sample + h * q.head
    queries = load_values(q.data, of_row, in_h, WIDTHS)
    of_queries = load_rest(q.data, of_row, in_h, queries, WIDTHS)
    grads = load_values(grad.data, row * grad.row + sample * grad.sample + h * grad.head, in_h, WIDTHS)
    deltas = tl.load(delta + before + h, mask=in_h, other=0.0)
    sums = tl.load(lse + before + h, mask=in_h, other=0.0) * 1.4426950408889634
    zeros = tl.zeros([PART, HEADS], tl.float32)
    acc = (zeros, zeros, zeros, zeros)
    of_rest = zeros
    if WIDTHS[3]:
        REST: tl.constexpr = WIDTHS[3]
        of_rest = tl.zeros([REST, HEADS], tl.float32)
    j = tl.arange(0, KEYS)
    for start in range(0, end_of_list(lists, count, SCAN), KEYS):
        key = tl.load(lists + start + j, mask=start + j < count, other=-1)
        at, inside = (key.to(tl.int64) * samples + sample) * WIDTH, key >= 0
        keys = load_values(k, at, inside, WIDTHS)
        rest = load_rest(k, at, inside, keys, WIDTHS)
        scores = scores_of(keys, rest, queries, of_queries, WIDTHS) * (scale * 1.4426950408889634)
        weights = tl.where(inside[:, None] & in_h[None, :], tl.exp2(scores - sums[None, :]), 0.0)
        ds = (weights * (products(keys, grads) - deltas[None, :]) * scale).to(keys[0].dtype)
        acc = add_rows(acc, keys, ds)
        if WIDTHS[3]:
            of_rest = dot(tl.trans(rest), ds, of_rest)
        if kept is not None:
            place = (((row * samples + sample) * count + start + j) * heads)[:, None] + h[None, :]
            tl.store(kept[0] + place, weights.to(keys[0].dtype), mask=inside[:, None] & in_h[None, :])
            tl.store(kept[1] + place, ds, mask=inside[:, None] & in_h[None, :])
        if dk is not None:
            _add_gradients(dk, at, inside, ds, queries, of_queries, weights.to(keys[0].dtype), grads, WIDTHS)
    store_values(dq, acc, before, h, in_h, WIDTHS, WIDTH)
    if WIDTHS[3]:
        store_heads(dq, of_rest, before, h, in_h, VALUES, WIDTHS[1], WIDTH)


@triton.jit
def selected_delta(grad, out, delta, samples, heads, values, HELD: tl.constexpr, HEADS: tl.constexpr):
    """Compute delta [n, b, heads], the sum of grad * out over channels."""
    row, sample, h, in_h, before = place_of(samples, heads, HEADS)
    c = tl.arange(0, HELD)
    mask = in_h[:, None] & (c < values)[None, :]
    at = row * grad.row + sample * grad.sample + h * grad.head
    of_grad = tl.load(grad.data + at[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    of_out = tl.load(out + (before + h)[:, None] * values + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + before + h, tl.sum(of_grad * of_out, 1), mask=in_h)


@triton.jit
def selected_weights(
    q, k, picked, lse, out, sizes, to_log2, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr, SCAN: tl.constexpr
):
    """Compute the attention weights of the keys in each query's list `picked`, summed over heads. The weights are added
    to `out` [n, b, count], which must be zero initially."""
    samples, heads, count = sizes
    HEADS: tl.constexpr = BLOCKS[0]
    KEYS: tl.constexpr = BLOCKS[1]
    row = tl.program_id(0).to(tl.int64) * samples + tl.program_id(1)
    at_row = tl.program_id(0).to(tl.int64) * q.row + tl.program_id(1) * q.sample
    lists, j = picked + row * count, tl.arange(0, KEYS)
    end = end_of_list(lists, count, SCAN)
    for h0 in range(0, heads, HEADS):
        h = h0 + tl.arange(0, HEADS)
        in_h = h < heads
        queries = load_values(q.data, at_row + h * q.head, in_h, WIDTHS)
        of_queries = load_rest(q.data, at_row + h * q.head, in_h, queries, WIDTHS)
        sums = tl.load(lse + row * heads + h, mask=in_h, other=0.0) * 1.4426950408889634
        for start in range(0, end, KEYS):
            key = tl.load(lists + start + j, mask=start + j < count, other=-1)
            at = (key.to(tl.int64) * samples + tl.program_id(1)) * (WIDTHS[0] + WIDTHS[1])
            keys = load_values(k, at, key >= 0, WIDTHS)
            scores = scores_of(keys, load_rest(k, at, key >= 0, keys, WIDTHS), queries, of_queries, WIDTHS) * to_log2
            weights = tl.where((key >= 0)[:, None] & in_h[None, :], tl.exp2(scores - sums[None, :]), 0.0)
            into = out + row * count + start + j
            total = tl.sum(weights, 1)
            if h0 > 0:
                total += tl.load(into, mask=start + j < count, other=0.0)
            tl.store(into, total, mask=start + j < count)
        tl.debug_barrier()  # because the next iteration of the loop reads sums that other threads have stored


class Tiling(NamedTuple):
    """Block sizes of the kernels on one kind of GPU."""

    forward: Blocks
    of_queries: Blocks
    adding: Blocks
    """Block sizes of the backward kernel that adds key gradients atomically."""
    of_keys: Tile


HOPPER = Tiling(Blocks(32, 64, 8, 2), Blocks(32, 64, 8, 2), Blocks(32, 32, 8, 2), Tile(128, 64, (128, 64), 8, 2))
"""Block sizes for GPUs of compute capability 9, which have 227 KiB of shared memory per program."""

BLACKWELL = Tiling(Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2), Tile(128, 64, (128, 64), 8, 2))
"""Block sizes for GPUs of compute capability 10. Larger blocks would need more shared memory than these GPUs have."""

SMALL = Tiling(Blocks(32, 32, 8, 2), Blocks(16, 32, 8, 1), Blocks(16, 32, 8, 1), Tile(64, 32, (128, 64), 8, 2))
"""Block sizes for GPUs of other compute capabilities, which have at least 99 KiB of shared memory per program."""

SCAN = 1024
"""Number of list entries that a program reads at once while it searches for the end of a query's list."""


def tiling(device: torch.device) -> Tiling:
    """Return the block sizes for a GPU according to its compute capability. Raise RuntimeError if the GPU's compute
    capability is below 8.0."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise RuntimeError(f"no kernel for compute capability {capability[0]}.{capability[1]}")
    return {9: HOPPER, 10: BLACKWELL}.get(capability[0], SMALL)


def _grid(q: Tensor, blocks: Blocks) -> tuple[int, int]:
    n, b, heads, _ = q.shape
    return n * triton.cdiv(heads, blocks.heads), b


def _scan(count: int) -> int:
    return min(SCAN, triton.next_power_of_2(count))


def attend_selected(
    q: Tensor, k: Tensor, picked: Tensor, sinks: Tensor | None, first: int, scale: float, values: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel; see `_attend` in `attention.py`."""
    (n, b, heads, width), count = q.shape, picked.shape[-1]
    out = q.new_empty(n, b, heads, values)
    sums = tuple(torch.empty(n, b, heads, dtype=torch.float32, device=q.device) for _ in range(3))
    blocks, widths = tiling(q.device).forward, Widths.of(width, values)
    given = Rows.of(q), k, picked, sinks, out, sums, (b, heads, count, first), scale * LOG2_E
    launch = selected_forward[_grid(q, blocks)]
    launch(
        *given,
        tuple(widths),
        (blocks.heads, blocks.keys),
        _scan(count),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    lse, of_first, highest = sums
    return out, lse, of_first, highest


def weights_of_selected(q: Tensor, k: Tensor, picked: Tensor, lse: Tensor, scale: float, values: int) -> Tensor:
    """Launch the kernel for attention weights; see `_weights` in `attention.py`."""
    (n, b, heads, width), count = q.shape, picked.shape[-1]
    out = torch.zeros(n, b, count, dtype=torch.float32, device=q.device)
    blocks, widths = tiling(q.device).forward, tuple(Widths.of(width, values))
    given = Rows.of(q), k, picked, lse, out, (b, heads, count), scale * LOG2_E, widths, (blocks.heads, blocks.keys)
    selected_weights[(n, b)](*given, _scan(count), num_warps=blocks.warps, num_stages=blocks.stages)
    return out


def selected_gradients(
    grad: Tensor, q: Tensor, k: Tensor, picked: Tensor, out: Tensor, lse: Tensor, scale: float, adds: bool
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernels; see `_gradients` in `attention.py`."""
    n, b, heads, width = q.shape
    values, count = out.shape[-1], picked.shape[-1]
    found, widths = tiling(q.device), Widths.of(width, values)
    dq, delta = q.new_empty(q.shape), torch.empty(n, b, heads, dtype=torch.float32, device=q.device)
    held, of_heads = triton.next_power_of_2(values), Blocks(16, 0, 4, 1)
    selected_delta[_grid(q, of_heads)](Rows.of(grad), out, delta, b, heads, values, held, of_heads.heads)
    if adds:
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        _backward(q, k, picked, grad, lse, delta, dq, dk, None, scale, widths, found.adding)
        return dq, dk
    rows = max(1, MOST_BYTES // (2 * b * count * heads * q.element_size()))
    parts = torch.zeros(PARTS, *k.shape, dtype=torch.float32, device=k.device)
    kept = q.new_empty(min(n, rows), b, count, heads), q.new_empty(min(n, rows), b, count, heads)
    for start in range(0, n, rows):
        each = slice(start, start + rows)
        of_rows = q[each], k, picked[each], grad[each], lse[each], delta[each], dq[each]
        _backward(*of_rows, None, kept, scale, widths, found.of_queries)
        sum_of_keys_(parts, grad[each], q[each], picked[each], *kept, found.of_keys)
    return dq, parts.sum(0)


def _backward(
    q: Tensor,
    k: Tensor,
    picked: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor | None,
    kept: tuple[Tensor, Tensor] | None,
    scale: float,
    widths: Widths,
    blocks: Blocks,
) -> None:
    (_, b, heads, _), count = q.shape, picked.shape[-1]
    rows = Rows.of(q), k, picked, Rows.of(grad), lse, delta, dq, dk, kept, (b, heads, count), scale, tuple(widths)
    launch = selected_backward[_grid(q, blocks)]
    launch(*rows, (blocks.heads, blocks.keys), _scan(count), num_warps=blocks.warps, num_stages=blocks.stages)
