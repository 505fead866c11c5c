"""Triton kernels of `norms.py`: a program holds whole rows in registers, so that each operand is read once.

A program of the backward takes several blocks of rows in turn and keeps its sums over them; a second kernel adds up
those of all programs, in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.availability import multiprocessors
from megatron.core.kernels.cast_transpose_triton import (
    FORMATS,
    _bits_of_size,
    cast_and_store,
    casts_of,
    note_amax,
    state_of,
)

ELEMENTS, WARPS = 2**15, 16
"""Elements that a program holds of each operand: 64 a thread. A backward, with more operands and sums, has half of
them, and a quarter where nothing is cast: only stores of columns gain by many rows."""

SUMMED, SUMMED_PARTS = 64, 32
"""Columns whose sums a program adds up, and programs whose sums it reads at a time."""


@triton.jit
def _scale_of(weight, j, in_j, ONE_PLUS: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.load(weight + j, mask=in_j, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale += 1.0
    return scale[None, :]


@triton.jit
def norm_cast_rows(  # type: ignore[no-untyped-def]
    x,
    update,
    weight,
    bias,
    multiplier,
    total,
    inverse,
    mean,
    rows,
    columns,
    scale,
    state,
    noted,
    n,
    h,
    eps,
    NOTES: tl.constexpr,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
):
    """x + update [n, h] -> `total`, its statistics [n], and its norm cast to `rows` and `columns`. The amax of the
    norm is noted."""
    i = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    j = tl.arange(0, TILE_H)
    in_i, in_j = i < n, j < h
    inside = in_i[:, None] & in_j[None, :]
    at = i[:, None] * h + j[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    if ADDS:
        added = (wide + tl.load(update + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + at, added, mask=inside)
        wide = added.to(tl.float32)
    if CENTERED:
        center = tl.sum(wide, axis=1) / h
        tl.store(mean + i, center, mask=in_i)
        wide = tl.where(inside, wide - center[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=1) / h + eps)
    tl.store(inverse + i, factor, mask=in_i)
    normed = wide * factor[:, None] * _scale_of(weight, j, in_j, ONE_PLUS)
    if BIAS:
        normed += tl.load(bias + j, mask=in_j, other=0.0).to(tl.float32)[None, :]
    normed = tl.where(inside, normed, 0.0).to(dtype).to(tl.float32)
    by = tl.load(multiplier)
    cast_and_store(normed, by, by, rows, columns, i, j, in_i, in_j, n, h, ROWS, COLUMNS, FORMAT, LARGEST)
    note_amax(tl.max(_bits_of_size(normed)), state, multiplier, scale, noted, NOTES)


@triton.jit
def norm_gradient_rows(  # type: ignore[no-untyped-def]
    x,
    of_total,
    of_normed,
    weight,
    inverse,
    mean,
    multiplier,
    dx,
    rows,
    columns,
    part_sums,
    scale,
    state,
    noted,
    n,
    h,
    steps,
    NOTES: tl.constexpr,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    SUMS: tl.constexpr,
    CASTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
):
    """Gradients `dx` [n, h] of x and their casts, of `steps` blocks of rows. `part_sums` [programs, sums, h] gets the
    program's sums: of the weight's gradient, with CENTERED of the bias's, with SUMS of dx. With CASTS the amax of dx
    is noted."""
    j = tl.arange(0, TILE_H)
    in_j = j < h
    gamma = _scale_of(weight, j, in_j, ONE_PLUS)
    of_weight = tl.zeros([TILE_H], tl.float32)
    of_bias = tl.zeros([TILE_H], tl.float32)
    of_dx = tl.zeros([TILE_H], tl.float32)
    bits = tl.zeros([TILE_H], tl.int32)
    for step in range(0, steps):
        i = ((step * tl.num_programs(0) + tl.program_id(0)) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        in_i = i < n
        inside = in_i[:, None] & in_j[None, :]
        at = i[:, None] * h + j[None, :]
        dy = tl.load(of_normed + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(inverse + i, mask=in_i, other=0.0)[:, None]
        if CENTERED:
            z = tl.where(inside, z - tl.load(mean + i, mask=in_i, other=0.0)[:, None], 0.0)
            of_bias += tl.sum(dy, axis=0)
        z *= factor
        of_weight += tl.sum(dy * z, axis=0)
        g = dy * gamma
        grad = g - z * (tl.sum(g * z, axis=1) / h)[:, None]
        if CENTERED:
            grad -= (tl.sum(g, axis=1) / h)[:, None]
        grad *= factor
        if ADDS:
            grad += tl.load(of_total + at, mask=inside, other=0.0).to(tl.float32)
        rounded = tl.where(inside, grad, 0.0).to(x.dtype.element_ty)
        tl.store(dx + at, rounded, mask=inside)
        grad = rounded.to(tl.float32)
        if SUMS:
            of_dx += tl.sum(grad, axis=0)
        if CASTS:
            by = tl.load(multiplier)
            cast_and_store(grad, by, by, rows, columns, i, j, in_i, in_j, n, h, ROWS, COLUMNS, FORMAT, LARGEST)
            bits = tl.maximum(bits, tl.max(_bits_of_size(grad), axis=0))
    place = part_sums + tl.program_id(0).to(tl.int64) * (1 + CENTERED + SUMS) * h + j
    tl.store(place, of_weight, mask=in_j)
    if CENTERED:
        tl.store(place + h, of_bias, mask=in_j)
    if SUMS:
        tl.store(place + (1 + CENTERED) * h, of_dx, mask=in_j)
    if CASTS:
        note_amax(tl.max(bits), state, multiplier, scale, noted, NOTES)


@triton.jit
def add_parts(parts, out, count, width, SUMMED: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """parts [count, width] -> their sum [width]"""
    j = tl.program_id(0) * SUMMED + tl.arange(0, SUMMED)
    total = tl.zeros([SUMMED], tl.float32)
    for start in range(0, count, PARTS):
        i = start + tl.arange(0, PARTS)
        inside = (i < count)[:, None] & (j < width)[None, :]
        total += tl.sum(tl.load(parts + i[:, None] * width + j[None, :], mask=inside, other=0.0), axis=0)
    tl.store(out + j, total, mask=j < width)


def tile_of(h: int, elements: int = ELEMENTS) -> dict[str, int]:
    """Rows of a block, and their padded length."""
    width = triton.next_power_of_2(h)
    return {"TILE_N": max(1, elements // width), "TILE_H": width}


def _outputs(x: Tensor, wanted: tuple[bool, bool], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    sizes = x.shape if wanted[0] else (0,), x.shape[::-1] if wanted[1] else (0,)
    rows, columns = (torch.empty(size, dtype=dtype, device=x.device) for size in sizes)
    return rows, columns


def norm_cast(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
    multiplier: Tensor,
    noted: Tensor | None,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    """See `norms`."""
    assert x.is_contiguous() and (update is None or update.is_contiguous())
    (n, h), tile = x.shape, tile_of(x.shape[1])
    rows, columns = _outputs(x, wanted, dtype)
    total = x if update is None else torch.empty_like(x)
    inverse, mean = (torch.empty(n, 1, device=x.device) for _ in range(2))
    scale = torch.empty((), device=x.device)
    norm_cast_rows[(triton.cdiv(n, tile["TILE_N"]),)](
        x,
        x if update is None else update,
        weight,
        weight if bias is None else bias,
        multiplier,
        total,
        inverse,
        mean,
        rows,
        columns,
        scale,
        state_of(x.device),
        scale if noted is None else noted,
        n,
        h,
        eps,
        noted is not None,
        update is not None,
        centered,
        bias is not None,
        one_plus,
        *wanted,
        FORMATS[dtype],
        torch.finfo(dtype).max,
        **tile,
        num_warps=WARPS,
    )
    statistics = [inverse, mean] if centered else [inverse]
    return [*([] if update is None else [total]), *statistics, *casts_of((rows, columns), wanted, scale)]


def norm_gradients(
    x: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    one_plus: bool,
    sums: bool,
    multiplier: Tensor | None,
    noted: Tensor | None,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    """See `norms`."""
    operands = x, of_normed, *(() if of_total is None else (of_total,)), *statistics
    assert all(operand.is_contiguous() for operand in operands)
    (n, h), centered, casts = x.shape, len(statistics) == 2, multiplier is not None
    tile = tile_of(h, ELEMENTS // (2 if casts else 4))
    rows, columns = _outputs(x, wanted, dtype)
    dx, blocks = torch.empty_like(x), triton.cdiv(n, tile["TILE_N"])
    programs = min(blocks, multiprocessors(x.device))  # whose registers a program fills
    steps = triton.cdiv(blocks, programs)
    part_sums = torch.empty(programs, 1 + centered + sums, h, device=x.device)
    scale = torch.empty((), device=x.device)
    norm_gradient_rows[(programs,)](
        x,
        x if of_total is None else of_total,
        of_normed,
        weight,
        statistics[0],
        statistics[-1],
        x if multiplier is None else multiplier,
        dx,
        rows,
        columns,
        part_sums,
        scale,
        state_of(x.device),
        scale if noted is None else noted,
        n,
        h,
        steps,
        noted is not None,
        of_total is not None,
        centered,
        one_plus,
        sums,
        casts,
        *wanted,
        FORMATS[dtype],
        torch.finfo(dtype).max,
        **tile,
        num_warps=WARPS,
    )
    summed = torch.empty(part_sums.shape[1:], dtype=weight.dtype, device=x.device)
    width = summed.numel()
    add_parts[(triton.cdiv(width, SUMMED),)](part_sums, summed, programs, width, SUMMED, SUMMED_PARTS)
    if multiplier is None:
        return [dx, summed]
    return [dx, summed, *casts_of((rows, columns), wanted, scale)]
