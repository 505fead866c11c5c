"""Triton kernels of `norms.py`.

Forward: a program holds whole rows in registers, and reads each operand once. So does a backward without casts of rows
whose sums fit in as well. The other backward takes blocks of rows by chunks of columns, in two passes: the second one
reads x and the gradient of the norm again, which the L2 cache has.

A program of a backward takes several blocks of rows in turn and keeps its sums over them; a second kernel adds up
those of all programs, in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.fusions.kernel_choice import multiprocessors
from megatron.extensions.fusions.kernels.cast_transpose_triton import (
    FORMATS,
    _bits_of_size,
    cast_and_store,
    casts_of,
    note_amax,
    outputs_of,
    state_of,
)

ELEMENTS, WARPS = 2**15, 16
"""Elements of 16 bits that a program of the forward holds of each operand: 64 a thread."""

GRADIENT_ELEMENTS = 2**13
"""Elements that a program of a backward holds of each operand: 16 a thread. With its sums over rows and with casts more
of them do not fit in the registers of a thread, 128."""

CACHED_ELEMENTS, CHUNK_ROWS = 2**16, 16
"""Elements of a block of rows that a program reads twice: of the two operands in 16 bits and of 132 programs they are
35 MB, of an L2 cache of 50. And its most rows, whose casts fill 16 bytes of a column."""

SUMMED, SUMMED_PARTS = 64, 32
"""Columns whose sums a program adds up, and programs whose sums it reads at a time."""


@triton.jit
def _scale_of(weight, j, in_j, ONE_PLUS: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.load(weight + j, mask=in_j, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale += 1.0
    return scale


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
    normed = wide * factor[:, None] * _scale_of(weight, j, in_j, ONE_PLUS)[None, :]
    if BIAS:
        normed += tl.load(bias + j, mask=in_j, other=0.0).to(tl.float32)[None, :]
    normed = tl.where(inside, normed, 0.0).to(dtype).to(tl.float32)
    by = tl.load(multiplier)
    cast_and_store(normed, by, by, rows, columns, i, j, in_i, in_j, n, h, ROWS, COLUMNS, FORMAT, LARGEST)
    note_amax(tl.max(_bits_of_size(normed)), state, multiplier, scale, noted, NOTES)


@triton.jit
def _normalized(x, at, inside, center, factor, CENTERED: tl.constexpr):  # type: ignore[no-untyped-def]
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        z = tl.where(inside, z - center[:, None], 0.0)
    return z * factor[:, None]


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    g, z, row_gz, row_g, factor, of_total, at, inside, h, ADDS: tl.constexpr, CENTERED: tl.constexpr
):
    """Gradient of x in fp32 from that of its normalized rows z, g, and the sums of g z and of g over a row."""
    grad = g - z * (row_gz / h)[:, None]
    if CENTERED:
        grad -= (row_g / h)[:, None]
    grad *= factor[:, None]
    if ADDS:
        grad += tl.load(of_total + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, grad, 0.0)


@triton.jit
def norm_gradient_rows(  # type: ignore[no-untyped-def]
    x,
    of_total,
    of_normed,
    weight,
    inverse,
    mean,
    dx,
    part_sums,
    n,
    h,
    steps,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    SUMS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
):
    """Gradients `dx` [n, h] of x, of `steps` blocks of rows. `part_sums` [programs, sums, h] gets the program's sums:
    of the weight's gradient, with CENTERED of the bias's, with SUMS of dx."""
    j = tl.arange(0, TILE_H)
    in_j = j < h
    gamma = _scale_of(weight, j, in_j, ONE_PLUS)[None, :]
    of_weight = tl.zeros([TILE_H], tl.float32)
    of_bias = tl.zeros([TILE_H], tl.float32)
    of_dx = tl.zeros([TILE_H], tl.float32)
    for step in range(0, steps):
        i = ((step * tl.num_programs(0) + tl.program_id(0)) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        in_i = i < n
        inside = in_i[:, None] & in_j[None, :]
        at = i[:, None] * h + j[None, :]
        factor = tl.load(inverse + i, mask=in_i, other=0.0)
        center = tl.load(mean + i, mask=in_i, other=0.0)
        dy = tl.load(of_normed + at, mask=inside, other=0.0).to(tl.float32)
        z = _normalized(x, at, inside, center, factor, CENTERED)
        of_weight += tl.sum(dy * z, axis=0)
        if CENTERED:
            of_bias += tl.sum(dy, axis=0)
        g = dy * gamma
        row_gz, row_g = tl.sum(g * z, axis=1), tl.sum(g, axis=1)
        grad = _gradient(g, z, row_gz, row_g, factor, of_total, at, inside, h, ADDS, CENTERED)
        rounded = grad.to(x.dtype.element_ty)
        tl.store(dx + at, rounded, mask=inside)
        if SUMS:
            of_dx += tl.sum(rounded.to(tl.float32), axis=0)
    place = part_sums + tl.program_id(0).to(tl.int64) * (1 + CENTERED + SUMS) * h + j
    tl.store(place, of_weight, mask=in_j)
    if CENTERED:
        tl.store(place + h, of_bias, mask=in_j)
    if SUMS:
        tl.store(place + (1 + CENTERED) * h, of_dx, mask=in_j)


@triton.jit
def _vectors(x):  # type: ignore[no-untyped-def]
    """x [n, h] -> [n, h / 8, 8]: of each vector a thread has all elements."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])


@triton.jit
def _add_rows(place, values, in_j, again):  # type: ignore[no-untyped-def]
    before = tl.load(place, mask=in_j & again, other=0.0)
    tl.store(place, before + tl.sum(values, axis=0), mask=in_j)


@triton.jit
def norm_gradient_chunks(  # type: ignore[no-untyped-def]
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
    """`norm_gradient_rows` by chunks of columns, with the casts of dx. With CASTS the amax of dx is noted.

    The first pass over a block's chunks sums up rows, the second one makes gradients, from the last chunk back: these
    are the ones that caches have. The sums over rows are in `part_sums` between steps."""
    chunks = tl.cdiv(h, TILE_H)
    sums = part_sums + tl.program_id(0).to(tl.int64) * (1 + CENTERED + SUMS) * h
    bits = tl.zeros([TILE_N, TILE_H // 8], tl.int32)
    for step in range(0, steps):
        i = ((step * tl.num_programs(0) + tl.program_id(0)) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        in_i = i < n
        factor = tl.load(inverse + i, mask=in_i, other=0.0)
        center = tl.load(mean + i, mask=in_i, other=0.0)
        sum_gz = tl.zeros([TILE_N, TILE_H // 8], tl.float32)
        sum_g = tl.zeros([TILE_N, TILE_H // 8], tl.float32)
        for chunk in range(0, chunks):
            j = chunk * TILE_H + tl.arange(0, TILE_H)
            inside = in_i[:, None] & (j < h)[None, :]
            at = i[:, None] * h + j[None, :]
            g = tl.load(of_normed + at, mask=inside, other=0.0).to(tl.float32)
            g *= _scale_of(weight, tl.broadcast_to(j[None, :], inside.shape), inside, ONE_PLUS)
            sum_gz += tl.sum(_vectors(g * _normalized(x, at, inside, center, factor, CENTERED)), axis=2)
            if CENTERED:
                sum_g += tl.sum(_vectors(g), axis=2)
        row_gz, row_g = tl.sum(sum_gz, axis=1), tl.sum(sum_g, axis=1)
        for chunk in range(0, chunks):
            j = (chunks - 1 - chunk) * TILE_H + tl.arange(0, TILE_H)
            in_j = j < h
            inside = in_i[:, None] & in_j[None, :]
            at = i[:, None] * h + j[None, :]
            dy = tl.load(of_normed + at, mask=inside, other=0.0).to(tl.float32)
            z = _normalized(x, at, inside, center, factor, CENTERED)
            _add_rows(sums + j, dy * z, in_j, step > 0)
            if CENTERED:
                _add_rows(sums + h + j, dy, in_j, step > 0)
            g = dy * _scale_of(weight, tl.broadcast_to(j[None, :], inside.shape), inside, ONE_PLUS)
            grad = _gradient(g, z, row_gz, row_g, factor, of_total, at, inside, h, ADDS, CENTERED)
            rounded = grad.to(x.dtype.element_ty)
            tl.store(dx + at, rounded, mask=inside)
            grad = rounded.to(tl.float32)
            if SUMS:
                _add_rows(sums + (1 + CENTERED) * h + j, grad, in_j, step > 0)
            if CASTS:
                by = tl.load(multiplier)
                cast_and_store(grad, by, by, rows, columns, i, j, in_i, in_j, n, h, ROWS, COLUMNS, FORMAT, LARGEST)
                bits = tl.maximum(bits, tl.max(_vectors(_bits_of_size(grad)), axis=2))
        tl.debug_barrier()  # the next step's threads read sums of other threads
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


def gradient_tile(h: int, casts: bool) -> tuple[bool, dict[str, int]]:
    """Whether a backward takes rows by chunks of columns, and rows of a block and columns of a chunk."""
    if not casts and h <= GRADIENT_ELEMENTS:
        return False, tile_of(h, GRADIENT_ELEMENTS)
    count = max(1, min(CHUNK_ROWS, CACHED_ELEMENTS // triton.next_power_of_2(h)))
    return True, {"TILE_N": count, "TILE_H": GRADIENT_ELEMENTS // count}


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
    (n, h), tile = x.shape, tile_of(x.shape[1], ELEMENTS * 2 // x.itemsize)
    rows, columns = outputs_of(n, h, wanted, dtype, x.device)
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
    chunked, tile = gradient_tile(h, casts)
    rows, columns = outputs_of(n, h, wanted, dtype, x.device)
    dx, blocks = torch.empty_like(x), triton.cdiv(n, tile["TILE_N"])
    programs = min(blocks, multiprocessors(x.device))  # whose registers a program fills
    steps = triton.cdiv(blocks, programs)
    part_sums = torch.empty(programs, 1 + centered + sums, h, device=x.device)
    scale = torch.empty((), device=x.device)
    given = x, x if of_total is None else of_total, of_normed, weight, statistics[0], statistics[-1]
    variant = of_total is not None, centered, one_plus, sums
    if chunked:
        norm_gradient_chunks[(programs,)](
            *given,
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
            *variant,
            casts,
            *wanted,
            FORMATS[dtype],
            torch.finfo(dtype).max,
            **tile,
            num_warps=WARPS,
        )
    else:
        norm_gradient_rows[(programs,)](*given, dx, part_sums, n, h, steps, *variant, **tile, num_warps=WARPS)
    summed = torch.empty(part_sums.shape[1:], dtype=weight.dtype, device=x.device)
    width = summed.numel()
    add_parts[(triton.cdiv(width, SUMMED),)](part_sums, summed, programs, width, SUMMED, SUMMED_PARTS)
    if multiplier is None:
        return [dx, summed]
    return [dx, summed, *casts_of((rows, columns), wanted, scale)]
