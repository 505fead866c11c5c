"""Triton kernels of `norms.py`.

In the forward pass, a program holds whole rows in registers and reads each operand once. The backward kernel processes
blocks of rows in chunks of columns, in two passes. The second pass reads x and the gradient of the norm from the L2
cache.

A program of the backward kernel processes several blocks of rows, and sums the parameter gradients over these blocks. A
second kernel adds the sums of all programs in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.speed.fp8.casts import CastParts
from megatron.extensions.speed.fusions.kernel_choice import multiprocessors
from megatron.extensions.speed.fusions.kernels.casts_triton import Casts, bits_of_size, cast_and_store, note_amax

ELEMENTS, WARPS = 2**15, 16
"""Settings of the forward kernel: number of 16-bit elements per program and operand (64 per thread), and number of
warps per program."""

GRADIENT_ELEMENTS = 2**13
"""Number of elements of each operand that a program of the backward kernel holds (16 per thread). If the kernel also
computes sums over rows and casts, more elements would not fit into the 128 registers of a thread."""

CACHED_ELEMENTS, CHUNK_ROWS = 2**16, 16
"""Maximum number of elements and maximum number of rows in a block. A program reads its block twice, the second time
from the L2 cache. With two 16-bit operands and 132 programs, the blocks take 35 MB of the 50 MB cache. With 16 rows,
each column of an fp8 block has 16 contiguous bytes in the cast by columns."""

SUMMED, SUMMED_PARTS = 64, 32
"""Settings of the kernel `add_parts`: number of columns that a program sums, and number of partial sums that a program
reads at a time."""


class Backward(NamedTuple):
    """Inputs of the backward kernel for rows [n, h]."""

    x: Tensor
    of_total: Tensor | None
    of_normed: Tensor
    weight: Tensor
    inverse: Tensor
    mean: Tensor | None
    """Mean of each row, if the norm is a LayerNorm; None for RMSNorm."""


@triton.jit
def _scale_of(weight, j, in_j, ONE_PLUS: tl.constexpr):
    scale = tl.load(weight + j, mask=in_j, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale += 1.0
    return scale


@triton.jit
def norm_cast_rows(
    x, update, weight, bias, total, inverse, mean, casts, n, h, eps, ONE_PLUS: tl.constexpr, TILE: tl.constexpr
):
    """Compute `total` = x + update [n, h], the statistics [n] of the rows of `total`, and the casts of the norm of
    `total`. The statistics include the `mean` only for LayerNorm. The kernel also records the amax of the norm."""
    i = (tl.program_id(0) * TILE[0] + tl.arange(0, TILE[0])).to(tl.int64)
    j = tl.arange(0, TILE[1])
    in_i, in_j = i < n, j < h
    inside = in_i[:, None] & in_j[None, :]
    at = i[:, None] * h + j[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    if update is not None:
        added = (wide + tl.load(update + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + at, added, mask=inside)
        wide = added.to(tl.float32)
    if mean is not None:
        center = tl.sum(wide, axis=1) / h
        tl.store(mean + i, center, mask=in_i)
        wide = tl.where(inside, wide - center[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=1) / h + eps)
    tl.store(inverse + i, factor, mask=in_i)
    normed = wide * factor[:, None] * _scale_of(weight, j, in_j, ONE_PLUS)[None, :]
    if bias is not None:
        normed += tl.load(bias + j, mask=in_j, other=0.0).to(tl.float32)[None, :]
    normed = tl.where(inside, normed, 0.0).to(dtype).to(tl.float32)
    cast_and_store(normed, casts, i, j, in_i, in_j, n, h)
    note_amax(tl.max(bits_of_size(normed)), casts)


@triton.jit
def _rows_of_step(given, step, n, TILE_N: tl.constexpr):
    """Return the row indices of a program's block, a mask of the rows within the matrix, and the statistics of the
    rows."""
    i = ((step * tl.num_programs(0) + tl.program_id(0)) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    in_i = i < n
    factor = tl.load(given.inverse + i, mask=in_i, other=0.0)
    center = factor if given.mean is None else tl.load(given.mean + i, mask=in_i, other=0.0)
    return i, in_i, center, factor


@triton.jit
def _normalized(given, at, inside, center, factor):
    z = tl.load(given.x + at, mask=inside, other=0.0).to(tl.float32)
    if given.mean is not None:
        z = tl.where(inside, z - center[:, None], 0.0)
    return z * factor[:, None]


@triton.jit
def _gradient(given, g, z, row_gz, row_g, factor, at, inside, h):
    """Compute the gradient of the norm's input in fp32. z contains the normalized rows, and g is the gradient of z.
    `row_gz` and `row_g` are the sums of g z and of g over each row."""
    grad = g - z * (row_gz / h)[:, None]
    if given.mean is not None:
        grad -= (row_g / h)[:, None]
    grad *= factor[:, None]
    if given.of_total is not None:
        grad += tl.load(given.of_total + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, grad, 0.0)


@triton.jit
def _vectors(x):
    """Reshape x [n, h] -> [n, h / 8, 8], so that a thread holds all elements of each vector."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])


@triton.jit
def _add_rows(place, values, in_j, again):
    before = tl.load(place, mask=in_j & again, other=0.0)
    tl.store(place, before + tl.sum(values, axis=0), mask=in_j)


@triton.jit
def norm_gradient_chunks(
    given,
    dx,
    part_sums,
    casts,
    n,
    h,
    steps,
    ONE_PLUS: tl.constexpr,
    SUMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the gradient `dx` [n, h] of x, and the casts of `dx`. Each program processes `steps` blocks of rows. The
    kernel also records the amax of dx. `part_sums` [programs, sums, h] receives the program's partial sums of the
    weight gradient, of the bias gradient (LayerNorm), and of dx (if SUMS is True).

    The first pass over the chunks of a block computes sums over each row. The second pass computes gradients, and
    processes the last chunk first, because the last chunks are still in the caches. `part_sums` accumulates the partial
    sums over all blocks of the program."""
    CENTERED: tl.constexpr = given.mean is not None
    TILE_N: tl.constexpr = TILE[0]
    TILE_H: tl.constexpr = TILE[1]
    chunks = tl.cdiv(h, TILE_H)
    sums = part_sums + tl.program_id(0).to(tl.int64) * (1 + CENTERED + SUMS) * h
    bits = tl.zeros([TILE_N, TILE_H // 8], tl.int32)
    for step in range(0, steps):
        i, in_i, center, factor = _rows_of_step(given, step, n, TILE_N)
        sum_gz = tl.zeros([TILE_N, TILE_H // 8], tl.float32)
        sum_g = tl.zeros([TILE_N, TILE_H // 8], tl.float32)
        for chunk in range(0, chunks):
            j = chunk * TILE_H + tl.arange(0, TILE_H)
            inside = in_i[:, None] & (j < h)[None, :]
            at = i[:, None] * h + j[None, :]
            g = tl.load(given.of_normed + at, mask=inside, other=0.0).to(tl.float32)
            g *= _scale_of(given.weight, tl.broadcast_to(j[None, :], inside.shape), inside, ONE_PLUS)
            sum_gz += tl.sum(_vectors(g * _normalized(given, at, inside, center, factor)), axis=2)
            if CENTERED:
                sum_g += tl.sum(_vectors(g), axis=2)
        row_gz, row_g = tl.sum(sum_gz, axis=1), tl.sum(sum_g, axis=1)
        for chunk in range(0, chunks):
            j = (chunks - 1 - chunk) * TILE_H + tl.arange(0, TILE_H)
            in_j = j < h
            inside = in_i[:, None] & in_j[None, :]
            at = i[:, None] * h + j[None, :]
            dy = tl.load(given.of_normed + at, mask=inside, other=0.0).to(tl.float32)
            z = _normalized(given, at, inside, center, factor)
            _add_rows(sums + j, dy * z, in_j, step > 0)
            if CENTERED:
                _add_rows(sums + h + j, dy, in_j, step > 0)
            g = dy * _scale_of(given.weight, tl.broadcast_to(j[None, :], inside.shape), inside, ONE_PLUS)
            rounded = _gradient(given, g, z, row_gz, row_g, factor, at, inside, h).to(dx.dtype.element_ty)
            tl.store(dx + at, rounded, mask=inside)
            grad = rounded.to(tl.float32)
            if SUMS:
                _add_rows(sums + (1 + CENTERED) * h + j, grad, in_j, step > 0)
            cast_and_store(grad, casts, i, j, in_i, in_j, n, h)
            bits = tl.maximum(bits, tl.max(_vectors(bits_of_size(grad)), axis=2))
        tl.debug_barrier()  # synchronize, because the next step reads sums that other threads of this program wrote
    note_amax(tl.max(bits), casts)


@triton.jit
def add_parts(parts, out, count, width, SUMMED: tl.constexpr, PARTS: tl.constexpr):
    """Sum `parts` [count, width] over the first dimension, and store the sums in `out` [width]."""
    j = tl.program_id(0) * SUMMED + tl.arange(0, SUMMED)
    total = tl.zeros([SUMMED], tl.float32)
    for start in range(0, count, PARTS):
        i = start + tl.arange(0, PARTS)
        inside = (i < count)[:, None] & (j < width)[None, :]
        total += tl.sum(tl.load(parts + i[:, None] * width + j[None, :], mask=inside, other=0.0), axis=0)
    tl.store(out + j, total, mask=j < width)


def tile_of(h: int, elements: int = ELEMENTS) -> tuple[int, int]:
    """Return the number of rows of a block, and the padded row length."""
    width = triton.next_power_of_2(h)
    return max(1, elements // width), width


def gradient_tile(h: int) -> tuple[int, int]:
    """Return the number of rows per block and of columns per chunk in the backward kernel."""
    count = max(1, min(CHUNK_ROWS, CACHED_ELEMENTS // triton.next_power_of_2(h)))
    return count, GRADIENT_ELEMENTS // count


def norm_cast(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
    *cast: *CastParts,
) -> list[Tensor]:
    """Launch the kernel that computes `norms.norm_cast`."""
    assert x.is_contiguous() and (update is None or update.is_contiguous())
    (n, h), tile = x.shape, tile_of(x.shape[1], ELEMENTS * 2 // x.itemsize)
    casts = Casts.of(n, h, *cast)
    total = None if update is None else torch.empty_like(x)
    inverse, mean = (torch.empty(n, 1, device=x.device) if made else None for made in (True, centered))
    operands = x, update, weight, bias, total, inverse, mean, casts, n, h, eps, one_plus
    norm_cast_rows[(triton.cdiv(n, tile[0]),)](*operands, tile, num_warps=WARPS)
    return [*(made for made in (total, inverse, mean) if made is not None), *casts.made()]


def norm_gradients(
    x: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    one_plus: bool,
    sums: bool,
    *cast: *CastParts,
) -> list[Tensor]:
    """Launch the kernels that compute `norms.norm_gradients`."""
    inverse, *means = statistics
    given = Backward(x, of_total, of_normed, weight, inverse, means[0] if means else None)
    assert all(operand is None or operand.is_contiguous() for operand in given)
    n, h = x.shape
    casts, tile = Casts.of(n, h, *cast), gradient_tile(h)
    dx, blocks = torch.empty_like(x), triton.cdiv(n, tile[0])
    # Launch one program per multiprocessor, because a program uses all registers of a multiprocessor.
    programs = min(blocks, multiprocessors(x.device))
    part_sums = torch.empty(programs, len(statistics) + sums, h, device=x.device)
    order = casts, n, h, triton.cdiv(blocks, programs), one_plus, sums, tile
    norm_gradient_chunks[(programs,)](given, dx, part_sums, *order, num_warps=WARPS)
    summed = torch.empty(part_sums.shape[1:], dtype=weight.dtype, device=x.device)
    width = summed.numel()
    add_parts[(triton.cdiv(width, SUMMED),)](part_sums, summed, programs, width, SUMMED, SUMMED_PARTS)
    return [dx, summed, *casts.made()]
