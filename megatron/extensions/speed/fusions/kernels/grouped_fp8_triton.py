"""Triton kernels for experts in fp8. One kernel casts the rows of experts by tiles of 128 tokens. One kernel adds
weight gradients, and its programs share a single list of tiles (see `grouped_triton.py`). One kernel multiplies rows by
the experts' matrices.

Tensor cores read fp8 operands along the dimension over which a product sums. Casts for weight gradients are therefore
stored as columns [k, tokens]. The rows of each expert are padded to whole tiles of 128, so that every load is aligned.
Each step of the loop processes one tile, and applies the tile's scales in fp32. Hopper's tensor cores sum with less
than fp32 precision, but they compute only the sums within a tile.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.speed.fp8.casts import E4M3, SMALLEST_AMAX, TILE
from megatron.extensions.speed.fp8.grouped import tiles_for
from megatron.extensions.speed.fusions.kernel_choice import multiprocessors
from megatron.extensions.speed.fusions.kernels.casts_triton import bits_of_size, multiplier_for, reciprocal, rounded
from megatron.extensions.speed.fusions.kernels.grouped_triton import (
    HEAD,
    ROWS,
    TAIL,
    WHOLE,
    Tiling,
    add_parts_kernel,
    list_item,
    list_steps,
    schedule_kernel,
    send_tile,
    tile_corner,
)

COLUMNS = 64
"""Number of columns of a tile that each program of `cast_along_tokens_kernel` casts."""

TILINGS = {
    "square": Tiling(128, 128, 1, warps=8, stages=4),
    "shallow": Tiling(128, 128, 1, warps=8, stages=3),
    "small": Tiling(64, 128, 1, warps=4, stages=3, of_multiprocessor=2),
}
"""Tilings of the weight gradient kernel, keyed by name. In these tilings, `rows` is the number of 128-row tiles per
step.

Larger tiles would leave no registers for the second accumulator of each output. The tiling "shallow" fits into the
shared memory of Ada GPUs.
"""


class RowTiling(NamedTuple):
    """Compilation settings of the kernel that multiplies rows by expert matrices: the numbers of rows, outputs and
    terms per step, and the numbers of warps and pipeline stages."""

    rows: int
    outputs: int
    terms: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_N": self.rows, "BLOCK_O": self.outputs, "BLOCK_K": self.terms}


ROW_TILINGS = {
    "square": RowTiling(128, 128, TILE, 8, 4),
    "shallow": RowTiling(128, 128, TILE, 8, 3),
    "flat": RowTiling(64, 128, TILE, 4, 3),
}
"""Tilings of the kernel that multiplies rows by expert matrices, keyed by name."""


@triton.jit
def cast_along_tokens_kernel(
    values,
    scale,
    x,
    ends,
    tile_ends,
    width,
    tokens,
    experts,
    EXPERTS: tl.constexpr,
    SMALLEST: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cast x [n, width] by tiles of TILE rows (tokens) of the same expert. Store the transposed values [width, tokens]
    and the scales [tokens / TILE, width], where `tokens` includes padding. A program casts COLUMNS columns of one tile.
    Tiles that belong to no expert are set to 0. EXPERTS is a power of two."""
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    of_tiles = tl.load(tile_ends + e, mask=e < experts, other=2147483647)
    expert = tl.sum((of_tiles <= tile).to(tl.int32))
    first_tile = tl.load(tile_ends + expert - 1, mask=expert > 0, other=0)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    n = start + (tile - first_tile) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    stop = tl.load(ends + expert, mask=expert < experts, other=0)
    inside = (n < stop)[:, None] & (k < width)[None, :]
    rows = tl.load(x + n[:, None].to(tl.int64) * width + k[None, :], mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(bits_of_size(rows), axis=0).to(tl.float32, bitcast=True)
    multiplier = multiplier_for(amax, values, SMALLEST)
    power = (multiplier.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(multiplier > 0, power, float("nan"))
    cast = rounded(rows, power[None, :], values)
    at = k[:, None].to(tl.int64) * tokens + tile * TILE + tl.arange(0, TILE)[None, :]
    tl.store(values + at, tl.trans(cast), mask=(k < width)[:, None])
    tl.store(scale + tile.to(tl.int64) * width + k, reciprocal(power), mask=k < width)


@triton.jit
def add_grouped_fp8_kernel(
    out,
    parts,
    dy,
    dy_scale,
    x,
    x_scale,
    schedule,
    outputs,
    inputs,
    tokens,
    experts,
    tiles,
    programs,
    EXPERTS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute out[e] += dy_e x_eᵀ for each expert e. The shapes are out[e] [outputs, inputs], dy [outputs, tokens], x
    [inputs, tokens], dy_scale [tokens / TILE, outputs] and x_scale [tokens / TILE, inputs]. The kernel works like
    `add_grouped_kernel`, but each step processes one tile of tokens. The schedule therefore counts tiles instead of
    rows, and is computed with BLOCK_N = 1."""
    item = tl.program_id(0) - programs
    step, end = 0, 0
    corner_o, corner_i = 0, 0
    total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for _ in range(list_steps(schedule, experts, tiles, tl.program_id(0), programs, EXPERTS, BLOCK_N)):
        if step + BLOCK_N >= end:
            item += programs
            _rank, tile, _part, step, end = list_item(schedule, item, experts, tiles, BLOCK_N)
            corner_o, corner_i = tile_corner(tile, outputs, inputs, BLOCK_O, BLOCK_I)
        else:
            step += BLOCK_N
        n = step * TILE + tl.arange(0, TILE)
        o, i = corner_o + tl.arange(0, BLOCK_O), corner_i + tl.arange(0, BLOCK_I)
        in_o, in_i = o < outputs, i < inputs
        of_dy = tl.load(dy + o[:, None].to(tl.int64) * tokens + n[None, :], mask=in_o[:, None], other=0.0)
        of_x = tl.load(x + i[None, :].to(tl.int64) * tokens + n[:, None], mask=in_i[None, :], other=0.0)
        by_dy = tl.load(dy_scale + step.to(tl.int64) * outputs + o, mask=in_o, other=0.0)
        by_x = tl.load(x_scale + step.to(tl.int64) * inputs + i, mask=in_i, other=0.0)
        total += tl.dot(of_dy, of_x) * by_dy[:, None] * by_x[None, :]
        if step + BLOCK_N >= end:
            # As in `add_grouped_kernel`, compute these values again instead of carrying them from one step to the next.
            rank, _tile, part, _step, _end = list_item(schedule, item, experts, tiles, BLOCK_N)
            expert = tl.load(schedule + HEAD + rank).to(tl.int64)
            slot = (item - tl.load(schedule + WHOLE) - tl.load(schedule + TAIL)).to(tl.int64)
            matrix, apart = out + expert * outputs * inputs, parts + slot * (BLOCK_O * BLOCK_I)
            send_tile(matrix, apart, part, total, corner_o, corner_i, outputs, inputs, BLOCK_O, BLOCK_I)
            total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)


@triton.jit
def row_products_kernel(
    y,
    x,
    x_scale,
    w,
    w_scale,
    ends,
    outputs,
    terms,
    experts,
    programs,
    TILED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute y_e [n_e, outputs] = x_e w_eᵀ, for x [n, terms] and w [experts, outputs, terms]. By default, x has one
    scale per row [n], and w has one scale per output [experts, outputs]. If TILED is True, x has one scale per tile [n,
    terms / BLOCK_K], and w has one scale per block [experts, outputs / BLOCK_K, terms / BLOCK_K]. Programs that run at
    the same time compute different outputs of the same rows."""
    e = tl.arange(0, EXPERTS)
    stops = tl.load(ends + e, mask=e < experts, other=0)
    starts = tl.load(ends + e - 1, mask=(e > 0) & (e < experts), other=0)
    of_rows = tl.cumsum(tl.where(e < experts, tl.cdiv(stops - starts, BLOCK_N), 0), 0)
    across, steps = tl.cdiv(outputs, BLOCK_O), tl.cdiv(terms, BLOCK_K)
    for item in range(tl.program_id(0), tl.max(of_rows) * across, programs):
        tile = item // across
        expert = tl.sum((of_rows <= tile).to(tl.int32))
        first = tl.max(tl.where(e < expert, of_rows, 0))
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        stop = tl.load(ends + expert)
        n = start + (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N)
        o = (item % across) * BLOCK_O + tl.arange(0, BLOCK_O)
        k = tl.arange(0, BLOCK_K)
        # Replace indices outside the matrix with indices inside the matrix. Results at the replaced indices are
        # computed but not stored.
        row, column = tl.minimum(n, stop - 1).to(tl.int64), (o % outputs).to(tl.int64)
        of_w = w + expert.to(tl.int64) * outputs * terms
        x_at, w_at = x + row[:, None] * terms + k[None, :], of_w + column[None, :] * terms + k[:, None]
        total = tl.zeros((BLOCK_N, BLOCK_O), dtype=tl.float32)
        blocks = w_scale + (expert.to(tl.int64) * tl.cdiv(outputs, BLOCK_K) + column // BLOCK_K) * steps
        for step in range(steps):
            used = k < terms - step * BLOCK_K
            of_x = tl.load(x_at, mask=used[None, :], other=0.0)
            of_matrix = tl.load(w_at, mask=used[:, None], other=0.0)
            if TILED:
                by = tl.load(x_scale + row * steps + step)[:, None] * tl.load(blocks + step)[None, :]
                total += tl.dot(of_x, of_matrix) * by
            else:
                total = tl.dot(of_x, of_matrix, total, max_num_imprecise_acc=BLOCK_K)
            x_at += BLOCK_K
            w_at += BLOCK_K
        if not TILED:
            of_outputs = tl.load(w_scale + expert.to(tl.int64) * outputs + column)
            total *= tl.load(x_scale + row)[:, None] * of_outputs[None, :]
        inside = (n < stop)[:, None] & (o < outputs)[None, :]
        to = y + n.to(tl.int64)[:, None] * outputs + o[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=inside)


def padded_experts(experts: int) -> int:
    """Round the number of experts up to a power of two of at least 16, as the kernels require."""
    return max(16, triton.next_power_of_2(experts))


def cast_along_tokens(x: Tensor, ends: Tensor, tile_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the kernel that casts x. Returns the fields `values` and `scale` of the result of
    `fp8.grouped.cast_along_tokens`."""
    assert x.is_contiguous() and ends.dtype == tile_ends.dtype == torch.int32
    (rows, width), experts = x.shape, ends.shape[0]
    tiles = tiles_for(rows, experts)
    values = torch.empty(width, TILE * tiles, dtype=E4M3, device=x.device)
    scale = torch.empty(tiles, width, dtype=torch.float32, device=x.device)
    shape = width, TILE * tiles, experts, padded_experts(experts)
    grid = tiles, triton.cdiv(width, COLUMNS)
    cast_along_tokens_kernel[grid](values, scale, x, ends, tile_ends, *shape, SMALLEST_AMAX, COLUMNS, TILE)
    return values, scale


def add_grouped_fp8_(
    out: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, tile_ends: Tensor, tiling: str
) -> None:
    """Launch the kernel that adds the fp8 weight gradients of experts to `out` (see `grouped_fp8_choice`)."""
    (experts, outputs, inputs), tokens = out.shape, x.shape[1]
    assert all(each.is_contiguous() for each in (out, dy, x, dy_scale, x_scale)) and tile_ends.dtype == torch.int32
    assert dy.shape == (outputs, tokens) and x.shape == (inputs, tokens) and out.dtype == torch.float32
    assert dy_scale.shape == (tokens // TILE, outputs) and x_scale.shape == (tokens // TILE, inputs)
    chosen = TILINGS[tiling]
    tiles = triton.cdiv(outputs, chosen.outputs) * triton.cdiv(inputs, chosen.inputs)
    programs = multiprocessors(out.device) * chosen.of_multiprocessor
    schedule = torch.empty(HEAD.value + 3 * experts, dtype=torch.int32, device=out.device)
    parts = out.new_empty(programs, chosen.outputs, chosen.inputs)
    padded, constants = padded_experts(experts), chosen.constants
    schedule_kernel[(1,)](schedule, tile_ends, experts, tiles, programs, programs, padded, chosen.rows)
    compiled = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    operands = dy, dy_scale, x, x_scale, schedule, outputs, inputs, tokens, experts, tiles, programs, padded
    add_grouped_fp8_kernel[(programs,)](out, parts, *operands, **constants, TILE=TILE, **compiled)
    shape = outputs, inputs, experts, tiles
    add_parts_kernel[(programs, chosen.outputs // ROWS)](out, parts, schedule, *shape, **constants, ROWS=ROWS)


def multiply_rows(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor, dtype: torch.dtype, tiling: str
) -> Tensor:
    """Launch the kernel that multiplies each fp8 row by its expert's matrix (see `grouped_fp8_choice`)."""
    (rows, terms), (experts, outputs, _) = x.shape, w.shape
    assert all(each.is_contiguous() for each in (x, x_scale, w, w_scale)) and ends.dtype == torch.int32
    assert w.shape[2] == terms and x_scale.shape[0] == rows
    tiled = w_scale.shape[1:] != (outputs, 1)
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    chosen = ROW_TILINGS[tiling]
    programs = multiprocessors(x.device) * (2 if chosen.rows * chosen.outputs < TILE * TILE else 1)
    shape = outputs, terms, experts, programs, tiled, padded_experts(experts)
    compiled = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    row_products_kernel[(programs,)](y, x, x_scale, w, w_scale, ends, *shape, **chosen.constants, **compiled)
    return y
