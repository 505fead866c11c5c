"""The casts of `megatron.extensions.fp8.cast_transpose` by Triton kernels, which read a matrix once for both casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.extensions.fp8.cast_transpose import (
    CastOrder,
    CastPair,
    amax_of,
    amax_of_rows_and_columns,
    cast_transpose,
    cast_transpose_noting_amax,
    transpose,
)
from megatron.extensions.fusions.kernel_choice import FusedKernel, RunShapes, gpu_operator, runs_triton

TOLERANCE = 2.0**-7
"""Numbers at the middle between two of fp8 may be rounded to either: a few of all."""

MODULE = "kernels.casts_triton"

CAST = "Tensor multiplier, Tensor(a!)? noted, bool[] wanted, ScalarType dtype"
"""The parts of a `CastOrder`, which operators that cast take last. These return the casts that are wanted, by rows
first, and the scale: each tensor once, as an operator must."""


def cast_by(operator: Callable[..., list[Tensor]], cast: CastOrder, *operands: Any) -> CastPair:
    """The casts that an operator makes."""
    *values, scale = operator(*operands, *cast)
    return paired(values, [scale], cast.wanted)


def paired(values: list[Tensor], scales: list[Tensor], wanted: tuple[bool, bool]) -> CastPair:
    """Values and scales as `wanted`, by rows first, or one scale for both."""
    rows, columns = wanted
    by_rows = (values[0], scales[0]) if rows else (None, None)
    return CastPair(*by_rows, *((values[-1], scales[-1]) if columns else (None, None)))


def made_casts(
    x: Tensor, size: tuple[int, int], _: Any, noted: Any, wanted: list[bool], dtype: torch.dtype
) -> list[Tensor]:
    """What an operator returns that casts a matrix [n, k] computed from x: by rows [n, k] and by columns [k, n], as
    wanted, and the scale."""
    sizes = [shape for shape, wants in zip((size, size[::-1]), wanted, strict=True) if wants]
    return [*(x.new_empty(shape, dtype=dtype) for shape in sizes), x.new_empty((), dtype=torch.float32)]


def wide(x: Tensor) -> Tensor:
    """16 bits in fp32."""
    return x.float() if x.itemsize == 2 else x


def _fake_cast(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    wanted = [(amax, shape) for amax, shape in ((row_amax, x.shape), (column_amax, x.shape[::-1])) if amax is not None]
    vector = wanted[0][0].ndim > 0
    sizes = [(shape[0], 1) for _, shape in wanted] if vector else [()]
    values = [x.new_empty(shape, dtype=dtype) for _, shape in wanted]
    return values + [x.new_empty(size, dtype=torch.float32) for size in sizes]


def _fake_amax(x: Tensor, wanted: list[bool]) -> list[Tensor]:
    shapes = [shape for shape, wants in zip(((x.shape[0], 1), (1, x.shape[1])), wanted, strict=True) if wants]
    return [x.new_empty(shape, dtype=torch.float32) for shape in shapes]


_by_amax = gpu_operator(
    f"{MODULE}:cast_transpose",
    "(Tensor x, Tensor? row_amax, Tensor? column_amax, ScalarType dtype) -> Tensor[]",
    _fake_cast,
)
_noting_amax = gpu_operator(
    f"{MODULE}:cast_transpose_noting_amax",
    f"(Tensor x, {CAST}) -> Tensor[]",
    lambda x, *cast: made_casts(x, (x.shape[0], x.shape[1]), *cast),
)
_amax = gpu_operator(f"{MODULE}:amax_of_rows_and_columns", "(Tensor x, bool[] wanted) -> Tensor[]", _fake_amax)
_transposed = gpu_operator(f"{MODULE}:transposed_bytes", "(Tensor x) -> Tensor", lambda x: x.new_empty(x.shape[::-1]))


def _cast(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype, _: bool) -> CastPair:
    wanted = row_amax is not None, column_amax is not None
    made = _by_amax(x, row_amax, column_amax, dtype)
    return paired(made[: sum(wanted)], made[sum(wanted) :], wanted)


def _amax_of_rows_and_columns(x: Tensor, wanted: tuple[bool, bool], _: bool) -> tuple[Tensor | None, Tensor | None]:
    found = _amax(x, wanted)
    return found[0] if wanted[0] else None, found[-1] if wanted[1] else None


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
CAST_BY_AMAX = FusedKernel(
    _cast,
    cast_transpose,
    lambda x, *_: runs_triton(x) and x.numel() > 0,
    lambda shapes: ((x, amax_of(x), amax_of(x), E4M3, True) for x in casts_of(shapes)),
    TOLERANCE,
)
CAST_NOTING = FusedKernel(
    lambda x, cast, compiled: cast_by(_noting_amax, cast, x),
    cast_transpose_noting_amax,
    on_triton,
    lambda shapes: ((x, order_of(x), True) for x in casts_of(shapes)),
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
    lambda values, compiled: _transposed(values.view(torch.uint8)).view(values.dtype),
    transpose,
    on_triton,
    lambda shapes: ((x.to(E4M3), True) for x in casts_of(shapes)),
    0.0,
)
