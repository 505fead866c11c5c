"""Scaled casts to 8-bit floating point, of a matrix by rows and by columns, from one read of the matrix.

A cast by rows has the matrix's shape [n, k], a cast by columns is its transpose [k, n]: GEMMs in fp8 sum along the last
dimension of both operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.parts import operation

SMALLEST_AMAX = 2.0**-100
"""Lower bound on the amax that sets a multiplier, so that multipliers stay finite."""


class CastPair(NamedTuple):
    """fp8 values by rows [n, k] and by columns [k, n], and the fp32 scales that undo their multipliers: [], or [n, 1]
    and [k, 1]. None where not asked for."""

    rows: Tensor | None
    row_scale: Tensor | None
    columns: Tensor | None
    column_scale: Tensor | None


class CastOrder(NamedTuple):
    """How to cast a matrix by a given multiplier [], as `wanted` by rows and by columns. `noted` [] becomes the larger
    of it and the matrix's amax."""

    multiplier: Tensor
    noted: Tensor | None
    wanted: tuple[bool, bool]
    dtype: torch.dtype


@operation
def cast_transpose(
    x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype, compiled: bool
) -> CastPair:
    """Casts x [n, k] scaled by an amax: by rows with `row_amax`, [] or [n, 1], by columns with `column_amax`, [] or
    [1, k]. None asks for no cast. An amax [] is that of the whole tensor, so that both casts have the same values."""
    return region(cast_transpose_twin, compiled, static=True)(x, row_amax, column_amax, dtype)


@operation
def cast_transpose_noting_amax(x: Tensor, cast: CastOrder, compiled: bool) -> CastPair:
    """Casts x [n, k] and notes its amax, which the multiplier ignores. The scales are NaN if the amax is not finite:
    the cast may have hidden that."""
    pair: CastPair = noting(cast_transpose_with_amax_twin, compiled, x, cast)
    return pair


def noting(twin: Callable[..., tuple[Any, Any]], compiled: bool, *operands: Any) -> Any:
    """The result of a twin, as a region, whose last operand is a `CastOrder` or None, and which returns an amax too:
    notes that."""
    *others, cast = operands
    found, amax = region(twin, compiled, static=True)(*others, cast and cast._replace(noted=None))
    if cast is not None and cast.noted is not None:
        torch.maximum(cast.noted, amax, out=cast.noted)
    return found


@operation
def amax_of_rows_and_columns(
    x: Tensor, wanted: tuple[bool, bool], compiled: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Largest absolute value of each row and of each column, as `wanted`: x [n, k] -> [n, 1] and [1, k], fp32."""
    return region(amax_of_rows_and_columns_twin, compiled, static=True)(x, wanted)


@operation
def transpose(values: Tensor, compiled: bool) -> Tensor:
    """The transpose [k, n] of fp8 values [n, k], row-major."""
    return region(transposed, compiled, static=True)(values)


def cast_transpose_twin(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype) -> CastPair:
    """`cast_transpose` in torch."""
    largest = torch.finfo(dtype).max
    rows = columns = row_scale = column_scale = None
    if row_amax is not None:
        multiplier = multiplier_of(row_amax, largest)
        rows, row_scale = round_scaled(x, multiplier, dtype), multiplier.reciprocal()
    if column_amax is not None and rows is not None and column_amax.ndim == 0:
        columns, column_scale = transposed(rows), row_scale
    elif column_amax is not None:
        multiplier = multiplier_of(column_amax, largest)
        columns = transposed(round_scaled(x, multiplier, dtype))
        column_scale = multiplier.reciprocal().view((x.shape[1], 1) if multiplier.ndim else ())
    return CastPair(rows, row_scale, columns, column_scale)


def cast_transpose_with_amax_twin(x: Tensor, cast: CastOrder) -> tuple[CastPair, Tensor]:
    """`cast_transpose_noting_amax` in torch, but for the note: also returns the amax."""
    amax = amax_of(x)
    scale = cast.multiplier.reciprocal() + 0.0 * amax
    values = round_scaled(x, cast.multiplier, cast.dtype)
    by_rows = (values, scale) if cast.wanted[0] else (None, None)
    by_columns = (transposed(values), scale) if cast.wanted[1] else (None, None)
    return CastPair(*by_rows, *by_columns), amax


def amax_of_rows_and_columns_twin(x: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """`amax_of_rows_and_columns` in torch."""
    rows = _amax_along(x, 1) if wanted[0] else None
    return rows, _amax_along(x, 0) if wanted[1] else None


def _amax_along(x: Tensor, dim: int) -> Tensor:
    size = x.abs() if x.shape[dim] else x.new_zeros([1 if d == dim else length for d, length in enumerate(x.shape)])
    return size.amax(dim, keepdim=True).to(torch.float32)


def round_scaled(x: Tensor, multiplier: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds x * multiplier, computed in fp32, to the nearest number of the format, ties to even.

    The clamp makes overflow saturate: what conversions do with it differs between devices. NaN stays NaN.
    """
    largest = torch.finfo(dtype).max
    return (x.to(torch.float32) * multiplier).clamp(-largest, largest).to(dtype).contiguous()


def transposed(values: Tensor) -> Tensor:
    """`transpose` in torch."""
    return values.view(torch.uint8).t().contiguous().view(values.dtype)


def amax_of(x: Tensor) -> Tensor:
    """Largest absolute value, an fp32 scalar. NaN if any element is NaN."""
    return (x.abs() if x.numel() else x.new_zeros(1)).amax().to(torch.float32)


def multiplier_of(amax: Tensor, largest: float | Tensor, margin: int = 0) -> Tensor:
    """Scaling multiplier largest / amax / 2^margin: 1 where amax is 0; 0 or NaN where it is not finite."""
    return torch.where(amax == 0, 1.0, largest / 2.0**margin / amax.clamp(min=SMALLEST_AMAX))
