"""Scaled casts to fp8 and GEMMs of their results (Micikevicius et al., "FP8 Formats", arXiv 2209.05433).

A matrix x is held as x8 = round(x * m). The multiplier m brings its largest value to the largest number of the format.
A GEMM sums in fp32 and multiplies by the scales 1 / m of both operands. Casts saturate, yet NaN and Inf are not lost:
they make the scale NaN or infinite, and with it the result.

The casts themselves are `cast_transpose.py`. Collectives run between a tensor's amax and its cast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megatron.core.parts import operation
from megatron.extensions.fp8.flags import ALIGNMENT, TILE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""Largest finite number of each format."""

BLOCK_CAPABILITY = 9
"""Major compute capability of the GPUs whose kernels take scales of tiles (Hopper). Older and newer ones have none."""

BLOCK_CUDA = (12, 9)
"""First CUDA whose kernels do."""

FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with fp8 GEMMs (Ada)."""


class Scaled(NamedTuple):
    """An fp8 matrix: fp8 values [n, k] and an fp32 scale. It stands for values * scale.

    There is one scale for all [], or one for each row [n, 1], tile [n, k / 128] or block [n / 128, k / 128].
    """

    values: Tensor
    scale: Tensor

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns values * scale, [n, k] in `dtype`."""
        return self.values.to(dtype) * by_block(self.scale, self.values.shape).to(dtype)

    @property
    def in_blocks(self) -> bool:
        """Whether there is a scale for each block."""
        return self.scale.ndim == 2 and self.scale.shape[0] != self.values.shape[0]

    @property
    def in_tiles(self) -> bool:
        """Whether there are several scales for each row."""
        return self.scale.ndim == 2 and not self.in_blocks and self.scale.shape[1] > 1


def by_block(scale: Tensor, shape: torch.Size) -> Tensor:
    """A scale or multiplier in a form that broadcasts to the matrix [n, k] whose blocks, rows or whole it is for."""
    if scale.ndim == 0 or (scale.shape[1] == 1 and scale.shape[0] == shape[0]):
        return scale
    rows = 1 if scale.shape[0] == shape[0] else TILE
    spread = scale[:, None, :, None].expand(-1, rows, -1, TILE)
    return spread.reshape(rows * scale.shape[0], TILE * scale.shape[1])[: shape[0], : shape[1]]


def formats(name: str) -> tuple[torch.dtype, torch.dtype]:
    """Returns the formats (of inputs and weights, of output gradients) of --fp8-format `name`."""
    return E4M3, E5M2 if name == "hybrid" else E4M3


def multiplies_in_fp8(x: Tensor) -> bool:
    """Whether operands like `x` go to torch's fp8 GEMM. That of CPUs takes up to a thousand times as long as a product
    of dequantized operands, which has the same values."""
    return x.is_cuda


def scaled_mm(
    a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None = None, fast_accumulation: bool = False
) -> Tensor:
    """fp8 GEMM: a [n, k], b [m, k], bias [m] -> a bᵀ + bias [n, m], summed in fp32 and rounded to `out_dtype`.

    With a scale for each row, CUDA returns bf16 whatever `out_dtype`: the one dtype that all of torch's kernels return.
    The only place that knows kernels. Both operands are row-major, so that b's transpose is column-major, the only
    arrangement that Hopper takes. CUDA needs multiples of 16 for k and m, and at most one operand in e5m2. On CPUs
    `dequantized_mm` computes it. With `fast_accumulation`, Hopper's tensor cores keep partial sums to fewer bits.
    """
    if b.in_blocks or b.in_tiles:
        return _block_scaled_mm(a, b, out_dtype, bias)
    by_row = a.scale.ndim == 2
    if not multiplies_in_fp8(a.values):
        return dequantized_mm(a, b, out_dtype, bias)
    if by_row and a.values.is_cuda:
        out_dtype = torch.bfloat16
    scale_b = b.scale.t() if by_row else b.scale
    return torch._scaled_mm(
        a.values, b.values.t(), a.scale, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accumulation
    )


def _block_scaled_mm(a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """`scaled_mm` of a in tiles and b in tiles or blocks. The kernel is cuBLAS', which scales after every 128 terms."""
    if not a.values.is_cuda:
        return dequantized_mm(a, b, out_dtype, bias)
    rows = a.values.shape[0]
    if rows % ALIGNMENT:  # of an expert
        a = Scaled(_in_whole_tiles(a.values, ALIGNMENT), F.pad(a.scale, (0, 0, 0, -rows % ALIGNMENT)))
    y = F.scaled_mm(
        _in_whole_tiles(a.values, 1),
        _in_whole_tiles(b.values, TILE if b.in_blocks else 1).t(),
        _tiles_as_columns(a.scale),
        ScalingType.BlockWise1x128,
        _blocks_as_columns(b.scale) if b.in_blocks else _tiles_as_columns(b.scale),
        ScalingType.BlockWise128x128 if b.in_blocks else ScalingType.BlockWise1x128,
        output_dtype=out_dtype,
    )
    y = y[:rows, : b.values.shape[0]].contiguous()
    return y if bias is None else y.add_(bias)


def _in_whole_tiles(values: Tensor, rows: int) -> Tensor:
    """fp8 values [n, k] with zeros up to multiples of `rows` and 128: some versions of torch take no smaller tiles."""
    n, k = values.shape
    if n % rows == 0 and k % TILE == 0:
        return values
    return F.pad(values.view(torch.uint8), (0, -k % TILE, 0, -n % rows)).view(values.dtype)


def _tiles_as_columns(scale: Tensor) -> Tensor:
    """Scales of tiles [n, tiles] with the rows next to each other, as the kernel reads them."""
    return scale.t().contiguous().t()


def _blocks_as_columns(scale: Tensor) -> Tensor:
    """Scales of blocks [m / 128, k / 128] -> [k / 128 in a multiple of four, m / 128], column-major."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()


def dequantized_mm(a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Computes `scaled_mm` without an fp8 kernel."""
    out = a.dequantized() @ b.dequantized().t()
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)


@operation
def add_fp8_product_(out: Tensor, dy: Scaled, x: Scaled, overwrite: bool) -> None:
    """out [o, i] += dy x^T, for dy [o, n] and x [i, n] cast by columns. With `overwrite` out = dy x^T."""
    product = scaled_mm(dy, x, out.dtype)
    out.copy_(product) if overwrite else out.add_(product)
