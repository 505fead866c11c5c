"""Blockwise fp8: weights scaled by blocks of 128 x 128, activations and gradients by tiles of 1 x 128.

The recipe follows DeepSeek-V3, arXiv 2412.19437, section 3.3.2 and figure 7. Tiles extend along the dimension that a
GEMM sums over, so that an outlier reduces precision only within one tile. Multipliers are powers of two, so that a
scaled value keeps its mantissa. Values that were cast by tiles along one dimension can be cast again by tiles along the
other dimension. A second cast only reduces the precision of small values (section 3.5.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.tensor_parallel.linear_gemms import Operand, rows_of
from megatron.extensions.speed.fp8.casts import E4M3, TILE, Scaled, multiplier_of, round_scaled, transpose
from megatron.extensions.speed.fp8.recipes import INPUT, WEIGHT, Fp8Gemms, Wanted

K = ParamSpec("K")
R = TypeVar("R")


def in_blocks(x: Tensor, rows: int) -> Tensor:
    """Divide x [n, k] into blocks [row blocks, rows, column blocks, 128], padded with zeros at the ends."""
    n, k = x.shape
    if n % rows or k % TILE:
        x = F.pad(x, (0, -k % TILE, 0, -n % rows))
    return x.view(x.shape[0] // rows, rows, x.shape[1] // TILE, TILE)


def amax_of_blocks(blocks: Tensor) -> Tensor:
    """Return the largest absolute value of each block: [n, rows, m, 128] -> [n, m], fp32."""
    return blocks.abs().amax(dim=(1, 3)).to(torch.float32)


def power_of_two(multiplier: Tensor) -> Tensor:
    """Round fp32 multipliers down to powers of two by keeping only the sign and exponent bits. If a block contains
    nonfinite values, its multiplier is 0 or NaN, and the result is NaN."""
    rounded_down = (multiplier.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(multiplier > 0, rounded_down, torch.nan)


def cast_by_blocks(x: Tensor, rows: int, dtype: torch.dtype) -> Scaled:
    """Cast x [n, k] by blocks of `rows` x 128. Pass `rows` = 1 for tiles, or `rows` = 128 for square blocks. The last
    blocks may be smaller."""
    n, k = x.shape
    blocks = in_blocks(x, rows)
    multiplier = power_of_two(multiplier_of(amax_of_blocks(blocks), torch.finfo(dtype).max))
    values = round_scaled(blocks, multiplier[:, None, :, None], dtype).flatten(2).flatten(0, 1)
    return Scaled(values[:n, :k].contiguous(), multiplier.reciprocal())


def cast_along_columns(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Cast the transpose of x [n, k] by tiles of 128 x 1. Returns values [k, n] and scale [k, n / 128]."""
    return cast_by_blocks(x.t(), 1, dtype)


def recast_along_columns(values: Tensor, scale: Tensor) -> Scaled:
    """Convert a cast by rows, with values [n, k] and scale [n, k / 128], to a cast by columns, with values [k, n] and
    scale [k, n / 128]."""
    return cast_along_columns(Scaled(values, scale).dequantized(), values.dtype)


class BlockwiseGemms(Fp8Gemms):
    """Blockwise recipe. A weight has one scale for each block of 128 x 128 elements, so its casts by rows and by
    columns have the same scales. All other operands have one scale for each tile of 1 x 128 elements.

    The GEMM for the weight gradient sums over tokens, and therefore needs a cast of the input by columns. This cast is
    computed from the cast by rows, because sequence parallelism gathers the cast by rows.
    """

    gathers_weights = True

    def cast(self, x: Tensor, which: int, wanted: Wanted) -> list[Scaled]:
        x, dtype = x.detach(), self.format_of(which)
        if which == WEIGHT:
            blocks = self._by_rows(x, TILE, dtype)
            columns = Scaled(transpose(blocks.values, self.compiled), blocks.scale.t())
            return [made for made, wants in zip((blocks, columns), wanted, strict=True) if wants]
        if which == INPUT:
            rows = self._by_rows(x, 1, dtype)
            return [*([rows] if wanted.rows else []), *([self._recast(rows)] if wanted.columns else [])]
        made = [self._by_rows(x, 1, dtype)] if wanted.rows else []
        if wanted.columns:
            made.append(self._region(cast_along_columns, x.shape[0] % TILE == 0)(x, dtype))
        return made

    def weight_multiplier(self, amax: Tensor) -> Tensor:
        return power_of_two(super().weight_multiplier(amax))

    def cast_to_gather(self, x: Tensor) -> Operand:
        values, scale = self._by_rows(rows_of(x), 1, E4M3)
        # The all-gather transfers the fp8 values as uint8, because some communication backends do not support fp8.
        return values.view(torch.uint8).view(x.shape), scale.view(*x.shape[:-1], -1)

    def cast_gathered(self, x: Operand, wanted: Wanted) -> Scaled:
        rows = Scaled(rows_of(x[0]).view(E4M3), rows_of(x[1]))
        return self._recast(rows) if wanted.columns else rows

    def _by_rows(self, x: Tensor, rows: int, dtype: torch.dtype) -> Scaled:
        whole = x.shape[0] % rows == 0 and x.shape[1] % TILE == 0
        return self._region(cast_by_blocks, whole)(x.detach(), rows, dtype)

    def _recast(self, rows: Scaled) -> Scaled:
        whole = rows.values.shape[0] % TILE == 0 and rows.values.shape[1] % TILE == 0
        return self._region(recast_along_columns, whole)(*rows)

    def _region(self, cast: Callable[K, R], whole: bool) -> Callable[K, R]:
        """Return `cast`, compiled if `whole` is True, that is, if the matrix consists of whole tiles. Some versions of
        torch's compiler apply wrong scales to incomplete tiles."""
        return region(cast, self.compiled and whole, static=True)
