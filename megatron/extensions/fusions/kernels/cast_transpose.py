"""The casts of `megatron.extensions.fp8.cast_transpose` by Triton kernels, which read a matrix once for both casts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.extensions.fp8.cast_transpose import (
    SMALLEST_AMAX,
    CastOrder,
    CastPair,
    amax_of,
    amax_of_rows_and_columns,
    cast_transpose,
    cast_transpose_noting_amax,
    transpose,
)
from megatron.extensions.fusions.kernel_choice import FusedKernel, RunShapes, runs_triton

TOLERANCE = 2.0**-7
"""Numbers at the middle between two of fp8 may be rounded to either: a few of all."""


def _cast(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype, _: bool) -> CastPair:
    wanted = row_amax is not None, column_amax is not None
    made = _by_amax(x, row_amax, column_amax, dtype)
    return paired(made[: sum(wanted)], made[sum(wanted) :], wanted)


def _cast_noting(
    x: Tensor, multiplier: Tensor, noted: Tensor | None, wanted: tuple[bool, bool], dtype: torch.dtype, _: bool
) -> CastPair:
    *values, scale = _noting_amax(x, multiplier, noted, *wanted, dtype)
    return paired(values, [scale], wanted)


def _amax_of_rows_and_columns(x: Tensor, wanted: tuple[bool, bool], _: bool) -> tuple[Tensor | None, Tensor | None]:
    found = _amax(x, *wanted)
    return found[0] if wanted[0] else None, found[-1] if wanted[1] else None


def _transpose(values: Tensor, _: bool) -> Tensor:
    return _transposed(values.view(torch.uint8)).view(values.dtype)


def on_triton(x: Tensor, *_: Any) -> bool:
    return runs_triton(x)


def casts_of(shapes: RunShapes) -> Iterator[Tensor]:
    """Matrices that a run casts."""
    if shapes.fp8 is not None:
        yield shapes.random(shapes.tokens, shapes.hidden)


def order_of(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> CastOrder:
    """A cast by rows and by columns with a scale that suits x, and an amax to note."""
    return CastOrder(torch.finfo(dtype).max / amax_of(x), torch.zeros((), device=x.device), (True, True), dtype)


E4M3 = torch.float8_e4m3fn
CAST = FusedKernel(
    _cast,
    cast_transpose,
    lambda x, *_: runs_triton(x) and x.numel() > 0,
    lambda shapes: ((x, amax_of(x), amax_of(x), E4M3, True) for x in casts_of(shapes)),
    TOLERANCE,
)
CAST_NOTING = FusedKernel(
    _cast_noting,
    cast_transpose_noting_amax,
    on_triton,
    lambda shapes: ((x, *order_of(x), True) for x in casts_of(shapes)),
    TOLERANCE,
)
AMAX = FusedKernel(
    _amax_of_rows_and_columns,
    amax_of_rows_and_columns,
    on_triton,
    lambda shapes: ((x, (True, True), True) for x in casts_of(shapes)),
    0.0,
)
TRANSPOSE = FusedKernel(
    _transpose, transpose, on_triton, lambda shapes: ((x.to(E4M3), True) for x in casts_of(shapes)), 0.0
)


def paired(values: list[Tensor], scales: list[Tensor], wanted: tuple[bool, bool]) -> CastPair:
    """What an operator returned: values and scales as `wanted`, by rows first, or one scale for both."""
    rows, columns = wanted
    return CastPair(
        values[0] if rows else None,
        scales[0] if rows else None,
        values[-1] if columns else None,
        scales[-1] if columns else None,
    )


def made_casts(x: Tensor, size: tuple[int, int], rows: bool, columns: bool, dtype: torch.dtype) -> list[Tensor]:
    """What an operator returns that casts a matrix [n, k] computed from x: by rows [n, k] and by columns [k, n], as
    wanted, and the scale."""
    sizes = [shape for shape, wants in ((size, rows), (size[::-1], columns)) if wants]
    return [*(x.new_empty(shape, dtype=dtype) for shape in sizes), x.new_empty((), dtype=torch.float32)]


def wide(x: Tensor) -> Tensor:
    """16 bits in fp32."""
    return x.float() if x.itemsize == 2 else x


# The operators return what is wanted, by rows first; each tensor once, as an operator must.


@torch.library.custom_op("megatron::cast_transpose", mutates_args=(), device_types="cuda")
def _by_amax(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    from megatron.extensions.fusions.kernels import cast_transpose_triton

    return cast_transpose_triton.cast_by_amax(x, row_amax, column_amax, dtype, SMALLEST_AMAX)


@_by_amax.register_fake
def _(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    wanted = [(amax, shape) for amax, shape in ((row_amax, x.shape), (column_amax, x.shape[::-1])) if amax is not None]
    vector = wanted[0][0].ndim > 0
    sizes = [(shape[0], 1) for _, shape in wanted] if vector else [()]
    values = [x.new_empty(shape, dtype=dtype) for _, shape in wanted]
    return values + [x.new_empty(size, dtype=torch.float32) for size in sizes]


@torch.library.custom_op("megatron::cast_transpose_noting_amax", mutates_args=("noted",), device_types="cuda")
def _noting_amax(
    x: Tensor, multiplier: Tensor, noted: Tensor | None, rows: bool, columns: bool, dtype: torch.dtype
) -> list[Tensor]:
    from megatron.extensions.fusions.kernels import cast_transpose_triton

    return cast_transpose_triton.cast_noting_amax(x, multiplier, noted, rows, columns, dtype)


@_noting_amax.register_fake
def _(x: Tensor, multiplier: Tensor, noted: Tensor | None, *cast: Any) -> list[Tensor]:
    return made_casts(x, (x.shape[0], x.shape[1]), *cast)


@torch.library.custom_op("megatron::amax_of_rows_and_columns", mutates_args=(), device_types="cuda")
def _amax(x: Tensor, rows: bool, columns: bool) -> list[Tensor]:
    from megatron.extensions.fusions.kernels import cast_transpose_triton

    return cast_transpose_triton.amax_of_rows_and_columns(x, rows, columns)


@_amax.register_fake
def _(x: Tensor, rows: bool, columns: bool) -> list[Tensor]:
    shapes = [shape for shape, wants in (((x.shape[0], 1), rows), ((1, x.shape[1]), columns)) if wants]
    return [x.new_empty(shape, dtype=torch.float32) for shape in shapes]


@torch.library.custom_op("megatron::transposed_bytes", mutates_args=(), device_types="cuda")
def _transposed(x: Tensor) -> Tensor:
    from megatron.extensions.fusions.kernels import cast_transpose_triton

    return cast_transpose_triton.transposed(x)


@_transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])
