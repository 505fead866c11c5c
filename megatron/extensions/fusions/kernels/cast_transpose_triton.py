"""Triton kernels of `cast_transpose.py`: each reads the matrix once.

A program casts one tile, and stores it as it is and transposed. Sizes are compared as the integers of their bits, whose
order is that of the numbers, NaN above infinity: a maximum is the same in any order, and keeps NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
WARPS = 8
FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _bits_of_size(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _reciprocal(x):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _multiplier_of(amax, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):  # type: ignore[no-untyped-def]
    bounded = tl.maximum(amax, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(amax == 0, 1.0, _reciprocal(bounded) * LARGEST)  # as torch divides a number by a tensor


@triton.jit
def _rounded(x, multiplier, FORMAT: tl.constexpr, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    scaled = tl.clamp(x * multiplier, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(FORMAT, fp_downcast_rounding="rtne")


@triton.jit
def cast_and_store(  # type: ignore[no-untyped-def]
    values,
    by_rows,
    by_columns,
    rows,
    columns,
    i,
    j,
    in_i,
    in_j,
    n,
    k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Casts `values` at the rows i and the columns j of a matrix [n, k], where the masks `in_i` and `in_j` hold, and
    stores them in `rows` [n, k] times `by_rows` and in `columns` [k, n] times `by_columns`, as they are asked for."""
    if ROWS:
        cast = _rounded(values, by_rows, FORMAT, LARGEST)
        tl.store(rows + i[:, None] * k + j[None, :], cast, mask=in_i[:, None] & in_j[None, :])
    if COLUMNS:
        cast = _rounded(values, by_columns, FORMAT, LARGEST)
        at = j.to(tl.int64)[:, None] * n + i[None, :]
        tl.store(columns + at, tl.trans(cast), mask=in_j[:, None] & in_i[None, :])


@triton.jit
def note_amax(bits, state, multiplier, scale, noted, NOTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The end of every program of a cast, which has found the `bits` of a largest size. The last one to get here stores
    the scale of the tensor, NaN if its amax is not finite, and the larger of the amax and `noted`.

    `state` [2] holds bits of the largest size so far and the number of programs that have ended: zeros before and
    after."""
    tl.atomic_max(state, bits)
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        largest = tl.atomic_xchg(state, 0)
        tl.atomic_xchg(state + 1, 0)
        tl.store(scale, _reciprocal(tl.load(multiplier)) + 0.0 * largest.to(tl.float32, bitcast=True))
        if NOTES:
            before = _bits_of_size(tl.load(noted))
            tl.store(noted, tl.maximum(before, largest).to(tl.float32, bitcast=True))


@triton.jit
def cast_tiles(  # type: ignore[no-untyped-def]
    x,
    given_rows,
    given_columns,
    rows,
    columns,
    row_scale,
    column_scale,
    state,
    noted,
    n,
    k,
    x_stride_n,
    x_stride_k,
    NOTES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_AMAX: tl.constexpr,
    BY_VECTOR: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Casts x [n, k] to `rows` [n, k] and `columns` [k, n]. What is given is an amax, or with BY_AMAX false a
    multiplier; one for all, or with BY_VECTOR [n] and [k]. With a multiplier the amax is noted, and `row_scale` is that
    of both."""
    across = tl.cdiv(k, TILE)
    tile_n, tile_k = tl.program_id(0) // across, tl.program_id(0) % across
    i = (tile_n * TILE + tl.arange(0, TILE)).to(tl.int64)
    j = (tile_k * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (i < n)[:, None] & (j < k)[None, :]
    values = tl.load(x + i[:, None] * x_stride_n + j[None, :] * x_stride_k, mask=inside, other=0.0).to(tl.float32)
    by_row, by_column = 1.0, 1.0
    if not BY_VECTOR:
        by_row = tl.load(given_rows)
        if BY_AMAX:
            by_row = _multiplier_of(by_row, LARGEST, SMALLEST)
            if tl.program_id(0) == 0:
                tl.store(row_scale, _reciprocal(by_row))
        by_column = by_row
    if BY_VECTOR and ROWS:
        of_rows = _multiplier_of(tl.load(given_rows + i, mask=i < n, other=0.0), LARGEST, SMALLEST)
        if tile_k == 0:
            tl.store(row_scale + i, _reciprocal(of_rows), mask=i < n)
        by_row = of_rows[:, None]
    if BY_VECTOR and COLUMNS:
        of_columns = _multiplier_of(tl.load(given_columns + j, mask=j < k, other=0.0), LARGEST, SMALLEST)
        if tile_n == 0:
            tl.store(column_scale + j, _reciprocal(of_columns), mask=j < k)
        by_column = of_columns[None, :]
    cast_and_store(values, by_row, by_column, rows, columns, i, j, i < n, j < k, n, k, ROWS, COLUMNS, FORMAT, LARGEST)
    if not BY_AMAX:
        note_amax(tl.max(_bits_of_size(values)), state, given_rows, row_scale, noted, NOTES)


@triton.jit
def amax_tiles(  # type: ignore[no-untyped-def]
    x,
    row_bits,
    column_bits,
    n,
    k,
    x_stride_n,
    x_stride_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raises `row_bits` [n] and `column_bits` [k], zero before, to the bits of the largest sizes in x [n, k]."""
    across = tl.cdiv(k, TILE)
    i = ((tl.program_id(0) // across) * TILE + tl.arange(0, TILE)).to(tl.int64)
    j = ((tl.program_id(0) % across) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (i < n)[:, None] & (j < k)[None, :]
    values = tl.load(x + i[:, None] * x_stride_n + j[None, :] * x_stride_k, mask=inside, other=0.0).to(tl.float32)
    bits = _bits_of_size(values)
    if ROWS:
        tl.atomic_max(row_bits + i, tl.max(bits, axis=1), mask=i < n, sem="relaxed")
    if COLUMNS:
        tl.atomic_max(column_bits + j, tl.max(bits, axis=0), mask=j < k, sem="relaxed")


@triton.jit
def transpose_tiles(x, out, n, k, x_stride_n, x_stride_k, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [n, k] -> out [k, n]"""
    across = tl.cdiv(k, TILE)
    i = ((tl.program_id(0) // across) * TILE + tl.arange(0, TILE)).to(tl.int64)
    j = ((tl.program_id(0) % across) * TILE + tl.arange(0, TILE)).to(tl.int64)
    at = x + i[:, None] * x_stride_n + j[None, :] * x_stride_k
    values = tl.load(at, mask=(i < n)[:, None] & (j < k)[None, :], other=0)
    tl.store(out + j[:, None] * n + i[None, :], tl.trans(values), mask=(j < k)[:, None] & (i < n)[None, :])


def _tiles(x: Tensor) -> int:
    return triton.cdiv(x.shape[0], TILE) * triton.cdiv(x.shape[1], TILE)


def outputs_of(
    n: int, k: int, wanted: tuple[bool, bool], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where casts of a matrix [n, k] go, by rows [n, k] and by columns [k, n]; empty where one is not wanted."""
    sizes = (n, k) if wanted[0] else (0,), (k, n) if wanted[1] else (0,)
    rows, columns = (torch.empty(size, dtype=dtype, device=device) for size in sizes)
    return rows, columns


_states: dict[tuple[torch.device, int], Tensor] = {}


def state_of(device: torch.device) -> Tensor:
    """The `state` of `note_amax`, one for each stream: kernels of one follow each other."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in _states:
        _states[device, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return _states[device, stream]


def casts_of(made: Sequence[Tensor], wanted: tuple[bool, bool], scale: Tensor) -> list[Tensor]:
    """The casts that are wanted, and their scale."""
    return [*(values for values, wants in zip(made, wanted, strict=True) if wants), scale]


def cast_by_amax(
    x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype, smallest_amax: float
) -> list[Tensor]:
    """Returns values by rows and by columns, without those whose amax is None, then their scales: one for both if the
    amax is []. x must not be empty."""
    wanted = row_amax is not None, column_amax is not None
    given = row_amax if row_amax is not None else column_amax
    assert given is not None
    vector = given.ndim > 0
    n, k = x.shape
    rows, columns = outputs_of(n, k, wanted, dtype, x.device)
    row_scale = torch.empty((n, 1) if vector else (), device=x.device)
    column_scale = torch.empty((k, 1), device=x.device) if vector else row_scale
    cast_tiles[(_tiles(x),)](
        x,
        given,
        given if column_amax is None else column_amax,
        rows,
        columns,
        row_scale,
        column_scale,
        row_scale,
        row_scale,
        n,
        k,
        *x.stride(),
        False,
        *wanted,
        True,
        vector,
        FORMATS[dtype],
        torch.finfo(dtype).max,
        smallest_amax,
        TILE,
        num_warps=WARPS,
    )
    values = [made for made, wants in zip((rows, columns), wanted, strict=True) if wants]
    scales = [made for made, wants in zip((row_scale, column_scale), wanted, strict=True) if wants]
    return values + (scales if vector else [row_scale])


def cast_noting_amax(
    x: Tensor, multiplier: Tensor, noted: Tensor | None, wants_rows: bool, wants_columns: bool, dtype: torch.dtype
) -> list[Tensor]:
    """Returns the values by rows and by columns, as wanted, and the scale; updates `noted`."""
    wanted = wants_rows, wants_columns
    n, k = x.shape
    rows, columns = outputs_of(n, k, wanted, dtype, x.device)
    if not _tiles(x):
        return casts_of((rows, columns), wanted, multiplier.reciprocal())
    scale = torch.empty((), device=x.device)
    cast_tiles[(_tiles(x),)](
        x,
        multiplier,
        multiplier,
        rows,
        columns,
        scale,
        scale,
        state_of(x.device),
        scale if noted is None else noted,
        n,
        k,
        *x.stride(),
        noted is not None,
        *wanted,
        False,
        False,
        FORMATS[dtype],
        torch.finfo(dtype).max,
        0.0,
        TILE,
        num_warps=WARPS,
    )
    return casts_of((rows, columns), wanted, scale)


def amax_of_rows_and_columns(x: Tensor, wants_rows: bool, wants_columns: bool) -> list[Tensor]:
    """Returns the largest sizes of rows [n, 1] and of columns [1, k], as wanted."""
    n, k = x.shape
    sizes = n if wants_rows else 0, k if wants_columns else 0
    rows, columns = (torch.zeros(size, dtype=torch.int32, device=x.device) for size in sizes)
    if _tiles(x):
        amax_tiles[(_tiles(x),)](x, rows, columns, n, k, *x.stride(), wants_rows, wants_columns, TILE, num_warps=WARPS)
    found = [rows.view(torch.float32).view(n, 1)] if wants_rows else []
    return found + ([columns.view(torch.float32).view(1, k)] if wants_columns else [])


def transposed(x: Tensor) -> Tensor:
    """The transpose of bytes."""
    n, k = x.shape
    out = torch.empty(k, n, dtype=x.dtype, device=x.device)
    if _tiles(x):
        transpose_tiles[(_tiles(x),)](x, out, n, k, *x.stride(), TILE, num_warps=WARPS)
    return out
