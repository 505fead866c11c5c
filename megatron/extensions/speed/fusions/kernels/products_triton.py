"""Triton kernels that add matrix products to an fp32 output: weight gradients of experts, and weight gradients from fp8
operands (`gemm_choice.py`)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUPED_TILE = {"BLOCK_O": 128, "BLOCK_I": 128, "BLOCK_N": 64}
"""Block sizes of the kernel for expert weight gradients: rows and columns of the gradient per program, and tokens that
a program reads at a time."""

CLEARED = 1024
"""Number of columns that each program of `clear_rows_kernel` sets to zero."""

TILE = {"TILE_O": 128, "TILE_I": 128, "TILE_N": 128, "GROUP": 8}
"""Default tile sizes for fp8. TILE_N is also the number of values that share a scale. Larger tiles would leave no
registers for the second accumulator of each output."""

WARPS, STAGES = 8, 4

OF_MATRIX, OF_ROWS, OF_TILES = range(3)
"""Granularity of an operand's scales: one scale for the whole matrix, one for each row, or one for each tile of a
row."""


@triton.jit
def add_products_kernel(
    out, dy, x, ends, outputs, inputs, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr
):
    tiles = tl.cdiv(inputs, BLOCK_I)
    tile, expert = tl.program_id(0), tl.program_id(1)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    if start >= stop:
        return
    o = (tile // tiles) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (tile % tiles) * BLOCK_I + tl.arange(0, BLOCK_I)
    total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for first in range(start, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        row, used = n[:, None].to(tl.int64), n[:, None] < stop
        of_dy = tl.load(dy + row * outputs + o[None, :], mask=used & (o[None, :] < outputs), other=0.0)
        of_x = tl.load(x + row * inputs + i[None, :], mask=used & (i[None, :] < inputs), other=0.0)
        total = tl.dot(tl.trans(of_dy), of_x, total, input_precision="ieee")
    place = (expert.to(tl.int64) * outputs + o[:, None]) * inputs + i[None, :]
    inside = (o[:, None] < outputs) & (i[None, :] < inputs)
    total += tl.load(out + place, mask=inside, other=0.0)
    tl.store(out + place, total, mask=inside)


@triton.jit
def clear_rows_kernel(x, ends, experts, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(ends + experts - 1):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + row.to(tl.int64) * width + column, 0.0, mask=column < width)


@triton.jit
def add_product_kernel(
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
    """Compute out [outputs, inputs] += (a * a_scale) (b * b_scale)ᵀ for a [outputs, n] and b [inputs, n]. If OVERWRITE
    is True, the product replaces the contents of `out`.

    SCALES states how many scales an operand has: one for the whole matrix, one for each row, or one for each TILE_N
    elements of a row. In these three cases, a_scale has the shape [], [outputs] or [outputs, n / TILE_N]. Programs that
    run at the same time share operands, because together they compute GROUP tiles of outputs for all tiles of inputs.
    Hopper's tensor cores sum TILE_N terms with less than fp32 precision. The kernel adds the resulting partial sums in
    fp32.
    """
    down, across = tl.cdiv(outputs, TILE_O), tl.cdiv(inputs, TILE_I)
    group, place = tl.program_id(0) // (GROUP * across), tl.program_id(0) % (GROUP * across)
    height = min(down - group * GROUP, GROUP)
    o = (group * GROUP + place % height) * TILE_O + tl.arange(0, TILE_O)
    i = (place // height) * TILE_I + tl.arange(0, TILE_I)
    k = tl.arange(0, TILE_N)
    # Row indices outside the matrix wrap around, and their results are not stored.
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


def add_grouped_products_(out: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """Launch the kernel that adds expert weight gradients with one program for each tile (see `grouped_choice`)."""
    experts, outputs, inputs = out.shape
    assert out.is_contiguous() and dy.is_contiguous() and x.is_contiguous() and ends.dtype == torch.int32
    assert dy.shape == (x.shape[0], outputs) and x.shape[1] == inputs and ends.shape == (experts,)
    tiles = triton.cdiv(outputs, GROUPED_TILE["BLOCK_O"]) * triton.cdiv(inputs, GROUPED_TILE["BLOCK_I"])
    add_products_kernel[(tiles, experts)](out, dy, x, ends, outputs, inputs, **GROUPED_TILE, num_warps=8)


def clear_rows_behind_(x: Tensor, ends: Tensor) -> None:
    """Launch the kernel that sets the rows after the last expert's rows to zero (see `grouped_choice`)."""
    rows, width = x.shape
    assert x.is_contiguous() and ends.dtype == torch.int32
    if rows:
        clear_rows_kernel[(rows, triton.cdiv(width, CLEARED))](x, ends, ends.shape[0], width, BLOCK=CLEARED)


def add_product_triton_(out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, overwrite: bool) -> None:
    """Launch the Triton kernel that `gemm_choice.KERNELS` lists."""
    (outputs, inputs), n = out.shape, a.shape[1]
    assert all(x.is_contiguous() for x in (out, a, b, a_scale, b_scale)) and a_scale.ndim == b_scale.ndim
    scales = OF_MATRIX if a_scale.ndim == 0 else OF_ROWS if a_scale.shape[1] == 1 else OF_TILES
    assert scales < OF_TILES or a_scale.shape[1] == triton.cdiv(n, TILE["TILE_N"])
    if overwrite and not n:
        out.zero_()
    if out.numel() and n:
        grid = (triton.cdiv(outputs, TILE["TILE_O"]) * triton.cdiv(inputs, TILE["TILE_I"]),)
        operands = out, a, b, a_scale, b_scale, outputs, inputs, n, scales, overwrite
        add_product_kernel[grid](*operands, **TILE, num_warps=WARPS, num_stages=STAGES)
