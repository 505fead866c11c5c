"""Triton kernel of `fp8_attention.py` for the forward pass of causal attention. The kernel works like FlashAttention-2
(arXiv 2307.08691).

Each program computes attention for one block of queries of one head in one sample. Only key blocks on the diagonal need
a mask. Hopper's tensor cores sum fp8 products with less than fp32 precision, so the kernel uses tensor cores only for
sums within a block of keys. Sums over several blocks are in fp32.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.speed.fusions.attention.fp8_attention import WEIGHTS
from megatron.extensions.speed.fusions.attention.row_blocks_triton import Rows, of_head

LOG2_E = tl.constexpr(1.4426950408889634)
OF_WEIGHTS = tl.constexpr(WEIGHTS)

BLOCKS = {64: (128, 128, 8, 3), 128: (128, 128, 8, 3)}
"""Compilation settings for each head width: queries per block, keys per block, warps and pipeline stages."""


@triton.jit
def _add_keys(
    sums, q, k, k_row, v, start, i, n, to_log2, WIDTHS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Add a block of keys to the online softmax of query rows. `sums` contains three running results for each row: the
    sum of the values times their rounded attention weights, the sum of the unrounded weights, and the largest score."""
    acc, total, top = sums
    j = start + tl.arange(0, BLOCK)
    d = tl.arange(0, q.shape[1])
    of_v = tl.arange(0, acc.shape[1])
    at_k = k + k_row * j[None, :] + d[:, None]
    at_v = v + of_v[:, None].to(tl.int64) * n + j[None, :]
    if MASKED or q.shape[1] != WIDTHS[0]:
        keys = tl.load(at_k, mask=(j < n)[None, :] & (d < WIDTHS[0])[:, None], other=0.0)
    else:
        keys = tl.load(at_k)
    scores = tl.dot(q, keys) * to_log2
    if MASKED:
        scores = tl.where(j[None, :] <= i[:, None], scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(top - highest)
    total = total * shrink + tl.sum(weights, 1)
    if MASKED or acc.shape[1] != WIDTHS[1]:
        values = tl.load(at_v, mask=(of_v < WIDTHS[1])[:, None] & (j < n)[None, :], other=0.0)
    else:
        values = tl.load(at_v)
    rounded = (weights * OF_WEIGHTS).to(values.dtype)
    acc = tl.dot(rounded, tl.trans(values), acc * shrink[:, None], max_num_imprecise_acc=BLOCK)
    return acc, total, highest


@triton.jit
def fp8_attention_kernel(
    out,
    lse,
    q,
    k,
    v,
    scales,
    n,
    samples,
    groups,
    ratio,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute out [n, samples, heads, DV] and lse [samples, heads, n] from q and k (`Rows`), v [samples, groups, DV, n]
    and scales [3, samples, groups]. `ratio` is the number of heads per group. The first programs process the rows with
    the most keys."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    heads = groups * ratio
    head, sample = tl.program_id(1) % heads, tl.program_id(1) // heads
    group = head // ratio
    place = sample * groups + group
    of_q = tl.load(scales + place)
    of_k = tl.load(scales + samples * groups + place)
    of_v = tl.load(scales + 2 * samples * groups + place)
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    at_q = of_head(q, sample, head) + q.row * i[:, None] + d[None, :]
    queries = tl.load(at_q, mask=(i < n)[:, None] & (d < D)[None, :], other=0.0)
    keys = of_head(k, sample, group)
    values = v + place.to(tl.int64) * DV * n
    to_log2 = of_q * of_k * scale * LOG2_E
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    sums = acc, tl.zeros((BLOCK_M,), tl.float32), tl.full((BLOCK_M,), float("-inf"), tl.float32)
    diagonal = block * BLOCK_M // BLOCK_N * BLOCK_N
    for start in range(0, diagonal, BLOCK_N):
        sums = _add_keys(sums, queries, keys, k.row, values, start, i, n, to_log2, (D, DV), BLOCK_N, False)
    for start in range(diagonal, min(n, (block + 1) * BLOCK_M), BLOCK_N):
        sums = _add_keys(sums, queries, keys, k.row, values, start, i, n, to_log2, (D, DV), BLOCK_N, True)
    acc, total, top = sums
    of_out = tl.arange(0, BLOCK_DV)
    result = acc * (of_v / (total * OF_WEIGHTS))[:, None]
    at = out + ((i.to(tl.int64) * samples + sample) * heads + head)[:, None] * DV + of_out[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(i < n)[:, None] & (of_out < DV)[None, :])
    tl.store(lse + (sample * heads + head).to(tl.int64) * n + i, (top + tl.log2(total)) / LOG2_E, mask=i < n)


def fp8_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scales: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute `fp8_attention.Kernels.forward` with a Triton kernel. Raises RuntimeError if the heads are wider than the
    kernel supports."""
    n, samples, heads, d = q.shape
    groups, dv = v.shape[1:3]
    width = max(64, triton.next_power_of_2(max(d, dv)))
    if width not in BLOCKS:
        raise RuntimeError(f"head widths {d} and {dv} exceed {max(BLOCKS)}")
    assert q.stride(3) == k.stride(3) == 1 and v.is_contiguous() and scales.is_contiguous()
    out = torch.empty(n, samples, heads, dv, dtype=dtype, device=q.device)
    lse = torch.empty(samples, heads, n, dtype=torch.float32, device=q.device)
    block_m, block_n, warps, stages = BLOCKS[width]
    fp8_attention_kernel[(triton.cdiv(n, block_m), samples * heads)](
        *(out, lse, Rows.of(q), Rows.of(k), v, scales, n, samples, groups, heads // groups, scale),
        **{"D": d, "DV": dv, "BLOCK_D": width, "BLOCK_DV": width, "BLOCK_M": block_m, "BLOCK_N": block_n},
        num_warps=warps,
        num_stages=stages,
    )
    return out, lse
