"""Triton kernel of `weight_grad_choice.py`: a GEMM in fp8 that adds to its fp32 output."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.fusions.kernel_choice import as_runtime_errors

TILE = {"TILE_O": 128, "TILE_I": 128, "TILE_N": 128, "GROUP": 8}
"""TILE_N is also what a scale of a tile is for. Larger tiles leave no registers for a second sum of each output."""

WARPS, STAGES = 8, 4

OF_MATRIX, OF_ROWS, OF_TILES = range(3)
"""What a scale is for."""


@triton.jit
def add_product_kernel(  # type: ignore[no-untyped-def]
    out,
    a,
    b,
    a_scale,
    b_scale,
    outputs,
    inputs,
    n,
    SCALES: tl.constexpr,
    OVERWRITE: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [outputs, inputs] += (a * a_scale) (b * b_scale)ᵀ, or = it, a [outputs, n], b [inputs, n].

    Scales are of the matrix [], of rows [outputs], or of tiles of a row [outputs, n / TILE_N]. Programs that run
    together share operands: they take GROUP tiles of outputs and all tiles of inputs. Hopper's tensor cores sum TILE_N
    terms to fewer bits; the sums of these are in fp32.
    """
    down, across = tl.cdiv(outputs, TILE_O), tl.cdiv(inputs, TILE_I)
    group, place = tl.program_id(0) // (GROUP * across), tl.program_id(0) % (GROUP * across)
    height = min(down - group * GROUP, GROUP)
    o = (group * GROUP + place % height) * TILE_O + tl.arange(0, TILE_O)
    i = (place // height) * TILE_I + tl.arange(0, TILE_I)
    k = tl.arange(0, TILE_N)
    # Rows outside are read from inside, and not stored.
    a_row, b_row = o % outputs, i % inputs
    a_at = a + a_row.to(tl.int64)[:, None] * n + k[None, :]
    b_at = b + b_row.to(tl.int64)[None, :] * n + k[:, None]
    tiles = tl.cdiv(n, TILE_N)
    total = tl.zeros((TILE_O, TILE_I), tl.float32)
    for tile in range(0, tiles):
        a_tile = tl.load(a_at, mask=k[None, :] < n - tile * TILE_N, other=0.0)
        b_tile = tl.load(b_at, mask=k[:, None] < n - tile * TILE_N, other=0.0)
        if SCALES == 2:
            by = tl.load(a_scale + a_row * tiles + tile)[:, None] * tl.load(b_scale + b_row * tiles + tile)[None, :]
            total += tl.dot(a_tile, b_tile) * by
        else:
            total = tl.dot(a_tile, b_tile, total, max_num_imprecise_acc=TILE_N)
        a_at += TILE_N
        b_at += TILE_N
    if SCALES == 0:
        total *= tl.load(a_scale) * tl.load(b_scale)
    if SCALES == 1:
        total *= tl.load(a_scale + a_row)[:, None] * tl.load(b_scale + b_row)[None, :]
    at = out + o.to(tl.int64)[:, None] * inputs + i[None, :]
    inside = (o < outputs)[:, None] & (i < inputs)[None, :]
    if not OVERWRITE:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)


def add_product_(out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, overwrite: bool = False) -> None:
    """See `fp8_weight_grad`."""
    (outputs, inputs), n = out.shape, a.shape[1]
    assert out.is_contiguous() and a.is_contiguous() and b.is_contiguous()
    assert a_scale.is_contiguous() and b_scale.is_contiguous() and a_scale.ndim == b_scale.ndim
    scales = OF_MATRIX if a_scale.ndim == 0 else OF_ROWS if a_scale.shape[1] == 1 else OF_TILES
    assert scales < OF_TILES or a_scale.shape[1] == triton.cdiv(n, TILE["TILE_N"])
    if overwrite and not n:
        out.zero_()
    if out.numel() and n:
        grid = (triton.cdiv(outputs, TILE["TILE_O"]) * triton.cdiv(inputs, TILE["TILE_I"]),)
        operands = out, a, b, a_scale, b_scale, outputs, inputs, n, scales, overwrite
        with as_runtime_errors("weight gradient in fp8"):
            add_product_kernel[grid](*operands, **TILE, num_warps=WARPS, num_stages=STAGES)
