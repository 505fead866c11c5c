"""Scaled casts to fp8, and GEMMs of the cast matrices (Micikevicius et al., "FP8 Formats", arXiv 2209.05433).

A matrix x is represented as x8 = round(x * m). The multiplier m maps the largest absolute value of x to the largest
number of the format. A GEMM sums in fp32 and multiplies by the scales 1 / m of both operands. Casts saturate, but NaN
and Inf are not lost, because they propagate to the scale and therefore to the result.

A cast by rows has the shape of the matrix, [n, k]. A cast by columns has the transposed shape [k, n], because fp8 GEMMs
sum along the last dimension of both operands. One pass over the matrix computes both the cast by rows and the cast by
columns. If a matrix is sharded, collectives reduce its amax over the ranks before the casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, TypeVarTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megatron.core import torch_private
from megatron.core.compiled_regions import region, torch_function
from megatron.core.kernels import operation
from megatron.extensions.speed.fp8.flags import ALIGNMENT, TILE

SMALLEST_AMAX = 2.0**-100
"""Lower bound on the amax from which a multiplier is computed, so that multipliers are finite."""


Made = TypeVar("Made")
Others = TypeVarTuple("Others")


class CastPair(NamedTuple):
    """fp8 casts of a matrix by rows [n, k] and by columns [k, n], with fp32 scales that undo the multipliers. There is
    one scale [] for the matrix, or one for each row [n, 1] and each column [k, 1]. A cast is None if it was not
    requested."""

    rows: Tensor | None
    row_scale: Tensor | None
    columns: Tensor | None
    column_scale: Tensor | None


class CastOrder(NamedTuple):
    """Request to cast a matrix with a given multiplier []. `wanted` states whether to cast by rows, by columns or both.
    The kernel sets `noted` [] to the maximum of `noted` and the amax of the matrix."""

    multiplier: Tensor
    noted: Tensor | None
    wanted: tuple[bool, bool]
    dtype: torch.dtype


CastParts = tuple[Tensor, Tensor | None, Sequence[bool], torch.dtype]
"""Fields of a `CastOrder`, in the form that torch operators accept."""


@operation
def cast_transpose(
    x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype, compiled: bool
) -> CastPair:
    """Cast x [n, k] by rows and by columns.

    Args:
        x: Matrix [n, k].
        row_amax: Amax [] or [n, 1] from which the scale of the cast by rows is computed. If None, the matrix is not
            cast by rows.
        column_amax: Amax [] or [1, k] from which the scale of the cast by columns is computed. If None, the matrix is
            not cast by columns. If both arguments are the same scalar amax, both casts have the same values.
        dtype: fp8 format.
        compiled: Whether to use a compiled region.
    """
    return region(cast_transpose_twin, compiled, static=True)(x, row_amax, column_amax, dtype)


@operation
def cast_transpose_noting_amax(x: Tensor, cast: CastOrder, compiled: bool) -> CastPair:
    """Cast x [n, k] and record its amax, which does not affect the multiplier. If the amax is not finite, the scales
    are NaN, so that saturation does not hide the overflow."""
    return noting(cast_transpose_with_amax_twin, compiled, cast, x)


def noting(
    twin: Callable[[*Others, CastOrder], tuple[Made, Tensor | None]],
    compiled: bool,
    cast: CastOrder,
    *others: *Others,
) -> Made:
    """Run a kernel's plain-torch twin in place of the kernel. `noting` records the amax that the twin returns, and
    returns the twin's other result.

    Args:
        twin: Plain-torch function that is called with `others` and `cast`, and returns the kernel's result and the
            amax.
        compiled: Whether to run the twin in a compiled region.
        cast: Request that states which casts to compute. The function passes the request to the twin as the last
            operand, and records the amax in the request's field `noted`.
        others: Other operands with which the twin is called.
    """
    found, amax = region(twin, compiled, static=True)(*others, cast._replace(noted=None))
    if cast.noted is not None:
        assert amax is not None
        torch.maximum(cast.noted, amax, out=cast.noted)
    return found


@operation
def amax_of_rows_and_columns(
    x: Tensor, wanted: tuple[bool, bool], compiled: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the largest absolute value of each row and of each column. `wanted` states whether to compute the row
    values [n, 1] and whether to compute the column values [1, k]. The values are in fp32."""
    return region(amax_of_rows_and_columns_twin, compiled, static=True)(x, wanted)


@operation
def transpose(values: Tensor, compiled: bool) -> Tensor:
    """Return the transpose [k, n] of fp8 values [n, k] as a row-major tensor."""
    return region(transposed, compiled, static=True)(values)


def cast_transpose_twin(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype) -> CastPair:
    """Compute `cast_transpose` in plain torch."""
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
    """Plain-torch version of `cast_transpose_noting_amax` that returns the amax instead of recording it."""
    amax = amax_of(x)
    scale = cast.multiplier.reciprocal() + 0.0 * amax
    values = round_scaled(x, cast.multiplier, cast.dtype)
    by_rows = (values, scale) if cast.wanted[0] else (None, None)
    by_columns = (transposed(values), scale) if cast.wanted[1] else (None, None)
    return CastPair(*by_rows, *by_columns), amax


def amax_of_rows_and_columns_twin(x: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """Compute `amax_of_rows_and_columns` in plain torch."""
    rows = _amax_along(x, 1) if wanted[0] else None
    return rows, _amax_along(x, 0) if wanted[1] else None


def _amax_along(x: Tensor, dim: int) -> Tensor:
    size = x.abs() if x.shape[dim] else x.new_zeros([1 if d == dim else length for d, length in enumerate(x.shape)])
    return size.amax(dim, keepdim=True).to(torch.float32)


def round_scaled(x: Tensor, multiplier: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x * multiplier, computed in fp32, to the nearest number of the format, with ties to even.

    Values beyond the range of the format are clamped explicitly, because devices handle overflow in conversions
    differently. NaN stays NaN.
    """
    largest = torch.finfo(dtype).max
    return (x.to(torch.float32) * multiplier).clamp(-largest, largest).to(dtype).contiguous()


def transposed(values: Tensor) -> Tensor:
    """Compute `transpose` in plain torch."""
    return values.view(torch.uint8).t().contiguous().view(values.dtype)


def amax_of(x: Tensor) -> Tensor:
    """Return the largest absolute value as an fp32 scalar, which is NaN if any element is NaN."""
    return (x.abs() if x.numel() else x.new_zeros(1)).amax().to(torch.float32)


def multiplier_of(amax: Tensor, largest: float | Tensor, margin: int = 0) -> Tensor:
    """Return the multiplier largest / amax / 2^margin. The multiplier is 1 if the amax is 0, and 0 or NaN if the amax
    is not finite."""
    return torch.where(amax == 0, 1.0, largest / 2.0**margin / amax.clamp(min=SMALLEST_AMAX))


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

BLOCK_CAPABILITY = 9
"""Major compute capability of the GPUs (Hopper) whose kernels support tile scales. Kernels for other GPUs, both older
and newer, do not support tile scales."""

BLOCK_CUDA = (12, 9)
"""Lowest CUDA version whose kernels support tile scales."""

FIRST_CAPABILITY = (8, 9)
"""Lowest compute capability with fp8 GEMMs (Ada)."""


class Scaled(NamedTuple):
    """Matrix in fp8: fp8 values [n, k] and an fp32 scale. The represented matrix is values * scale.

    There is one scale for the whole matrix [], or one for each row [n, 1], tile [n, k / 128] or block [n / 128, k /
    128].
    """

    values: Tensor
    scale: Tensor

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return values * scale, [n, k] in `dtype`."""
        return self.values.to(dtype) * by_block(self.scale, self.values.shape).to(dtype)

    @property
    def in_blocks(self) -> bool:
        """True if each block has its own scale."""
        return self.scale.ndim == 2 and self.scale.shape[0] != self.values.shape[0]

    @property
    def in_tiles(self) -> bool:
        """True if each row of the matrix has more than one scale."""
        return self.scale.ndim == 2 and not self.in_blocks and self.scale.shape[1] > 1


def by_block(scale: Tensor, shape: torch.Size) -> Tensor:
    """Expand a scale or multiplier of blocks, rows or the whole matrix to a shape that broadcasts to the matrix [n,
    k]."""
    if scale.ndim == 0 or (scale.shape[1] == 1 and scale.shape[0] == shape[0]):
        return scale
    rows = 1 if scale.shape[0] == shape[0] else TILE
    spread = scale[:, None, :, None].expand(-1, rows, -1, TILE)
    return spread.reshape(rows * scale.shape[0], TILE * scale.shape[1])[: shape[0], : shape[1]]


def formats(name: str) -> tuple[torch.dtype, torch.dtype]:
    """Return (format of inputs and weights, format of output gradients) for --fp8-format `name`."""
    return E4M3, E5M2 if name == "hybrid" else E4M3


def multiplies_in_fp8(x: Tensor) -> bool:
    """Return True if matrix products on the device of `x` use torch's fp8 GEMM. On CPUs, torch's fp8 GEMM takes up to a
    thousand times as long as a product of dequantized operands. The fp8 GEMM and the product of dequantized operands
    compute the same values."""
    return x.is_cuda


def scaled_mm(
    a: Scaled,
    b: Scaled,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute an fp8 GEMM: a [n, k], b [m, k], bias [m] -> a bᵀ + bias [n, m], summed in fp32.

    This is the only function of the module that depends on which fp8 kernels are available. Both operands are
    row-major, so that the transpose of b is column-major, which is the only layout that Hopper supports. CUDA requires
    that k and m are multiples of 16, and that at most one operand is e5m2. On CPUs, `dequantized_mm` computes the
    product.

    Args:
        a: First operand [n, k].
        b: Second operand [m, k].
        out_dtype: Dtype of the result. With row scales, CUDA always returns bf16, the only dtype that all of torch's
            kernels support.
        bias: Bias [m].
        fast_accumulation: Whether Hopper's tensor cores may keep partial sums with fewer bits.
        out: Memory for the result; supported only if each operand has a single scale.
    """
    if b.in_blocks or b.in_tiles:
        return _block_scaled_mm(a, b, out_dtype, bias)
    by_row = a.scale.ndim == 2
    if not multiplies_in_fp8(a.values):
        return dequantized_mm(a, b, out_dtype, bias, out)
    if by_row and a.values.is_cuda:
        out_dtype = torch.bfloat16
    scale_b = b.scale.t() if by_row else b.scale
    return torch_private.scaled_mm(
        a.values,
        b.values.t(),
        a.scale,
        scale_b,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
        **({} if out is None else {"out": out}),
    )


def _block_scaled_mm(a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Compute `scaled_mm` if `a` is scaled by tiles and `b` by tiles or blocks. The cuBLAS kernel applies the scales
    after every 128 terms of the sum."""
    if not a.values.is_cuda:
        return dequantized_mm(a, b, out_dtype, bias)
    rows = a.values.shape[0]
    if rows % ALIGNMENT:  # for example, an expert with few tokens: pad its rows
        a = Scaled(_in_whole_tiles(a.values, ALIGNMENT), F.pad(a.scale, (0, 0, 0, -rows % ALIGNMENT)))
    values, others = _in_whole_tiles(a.values, 1), _in_whole_tiles(b.values, TILE if b.in_blocks else 1).t()
    scale = _tiles_as_columns(a.scale)
    if values.dtype == others.dtype == E4M3:
        kind = ScalingType.BlockWise128x128 if b.in_blocks else ScalingType.BlockWise1x128
        of_b = _blocks_as_columns(b.scale) if b.in_blocks else _tiles_as_columns(b.scale)
        y = F.scaled_mm(values, others, scale, ScalingType.BlockWise1x128, of_b, kind, output_dtype=out_dtype)
    else:  # F.scaled_mm does not support e5m2; `torch._scaled_mm` does, but not for all block shapes
        tiles = b.scale.repeat_interleave(TILE, 0) if b.in_blocks else b.scale
        y = torch_private.scaled_mm(values, others, scale, _tiles_as_columns(tiles).t(), out_dtype=out_dtype)
    y = y[:rows, : b.values.shape[0]].contiguous()
    return y if bias is None else y.add_(bias)


def _in_whole_tiles(values: Tensor, rows: int) -> Tensor:
    """Pad fp8 values [n, k] with zeros, so that n is a multiple of `rows` and k a multiple of 128. Some torch versions
    do not support incomplete tiles."""
    n, k = values.shape
    if n % rows == 0 and k % TILE == 0:
        return values
    return F.pad(values.view(torch.uint8), (0, -k % TILE, 0, -n % rows)).view(values.dtype)


def _tiles_as_columns(scale: Tensor) -> Tensor:
    """Convert tile scales [n, tiles] to column-major order, as the fp8 kernel requires."""
    return scale.t().contiguous().t()


def _blocks_as_columns(scale: Tensor) -> Tensor:
    """Convert block scales [m / 128, k / 128] to a column-major tensor [k / 128 rounded up to a multiple of four, m /
    128]."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()


@torch_function
def dequantized_mm(
    a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute `scaled_mm` from dequantized operands, without an fp8 kernel. The arguments have the same meaning as in
    `scaled_mm`."""
    product = a.dequantized() @ b.dequantized().t()
    rounded = (product if bias is None else product + bias.to(torch.float32)).to(out_dtype)
    return rounded if out is None else out.copy_(rounded)


@operation
@torch_function
def add_fp8_product_(out: Tensor, dy: Scaled, x: Scaled, overwrite: bool) -> None:
    """Add an fp8 product in place: out [o, i] += dy xᵀ.

    Args:
        out: Sum [o, i].
        dy: Output gradient [o, n], cast by columns.
        x: Input [i, n], cast by columns.
        overwrite: If True, replace the contents of `out` with dy xᵀ.
    """
    product = scaled_mm(dy, x, out.dtype)
    out.copy_(product) if overwrite else out.add_(product)
