"""fp8 GEMMs of mixture-of-experts layers: rows are sorted by expert, and each row is multiplied by the matrix of its
expert.

Activations and their gradients have a scale for each row. A row holds the features of one token, so that no scale
depends on other tokens of the micro-batch. torch's grouped kernel supports only row scales and e4m3. Weight gradients
sum over tokens, so their operands are scaled by tiles of 128 rows of an expert (DeepSeek-V3, arXiv 2412.19437, section
3.3.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.collectives import all_reduce_
from megatron.core.compiled_regions import region, torch_function
from megatron.core.kernels import KERNELS, LEFT_OUT, operation
from megatron.core.moe.grouped_gemms import Segments, add_products_grouped_
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.linear_gemms import Cuts
from megatron.core.torch_private import scaled_grouped_mm
from megatron.extensions.speed.fp8.blockwise import cast_by_blocks, power_of_two
from megatron.extensions.speed.fp8.casts import (
    E4M3,
    TILE,
    Scaled,
    multiplier_of,
    multiplies_in_fp8,
    round_scaled,
    scaled_mm,
    transposed,
)
from megatron.extensions.speed.fp8.recipes import Fp8Context

GROUPED_CAPABILITIES = ((9, 0), (10, 0))
"""Compute capabilities of the GPUs on which torch's grouped kernel supports fp8 with row scales."""


def has_grouped_fp8_kernel(recipe: str, device: torch.device) -> bool:
    """Return True if a single kernel computes the fp8 products of all experts, so that the experts' numbers of rows are
    not copied to the host. Such kernels are torch's grouped kernel, and the registered kernel "grouped_scaled_mm" if
    this kernel is not turned off."""
    if device.type != "cuda" or ("grouped_scaled_mm" in KERNELS and "grouped_scaled_mm" not in LEFT_OUT):
        return True
    return recipe != "blockwise" and torch.cuda.get_device_capability(device) in GROUPED_CAPABILITIES


def torch_groups(a: Scaled, in_one_kernel: bool) -> bool:
    """Return True if a grouped kernel is requested and torch's grouped kernel supports the device and the scales of
    `a`."""
    fits = in_one_kernel and a.values.is_cuda and a.scale.shape[1] == 1
    return fits and torch.cuda.get_device_capability(a.values.device) in GROUPED_CAPABILITIES


@operation
@torch_function
def grouped_scaled_mm(a: Scaled, b: Scaled, segments: Segments, out_dtype: torch.dtype, in_one_kernel: bool) -> Tensor:
    """Compute an fp8 GEMM for each expert: a [n, k], b [experts, m, k] -> a_e b_eᵀ [n, m]. Rows of the result that
    belong to no expert are 0.

    Args:
        a: Rows [n, k], sorted by expert.
        b: Matrices [experts, m, k].
        segments: Rows of each expert.
        out_dtype: Dtype of the result. torch's grouped kernel returns bf16, which is then converted to this dtype.
        in_one_kernel: Whether to use torch's grouped kernel if it supports the operands.
    """
    y = a.scale.new_empty((a.values.shape[0], b.values.shape[1]), dtype=out_dtype)
    if not a.values.shape[0]:
        return y
    if torch_groups(a, in_one_kernel):
        experts = b.values.shape[0]
        columns, scales = b.values.transpose(1, 2), (a.scale.view(-1), b.scale.view(experts, -1))
        y = scaled_grouped_mm(a.values, columns, *scales, offs=segments.ends, out_dtype=torch.bfloat16)
        return segments.clear_spare_(y)
    for out, values, scale, matrix, matrix_scale in zip(
        segments.split(y), segments.split(a.values), segments.split(a.scale), b.values, b.scale, strict=True
    ):
        if values.shape[0]:
            out.copy_(scaled_mm(Scaled(values, scale), Scaled(matrix, matrix_scale), out_dtype))
    return segments.clear_spare_(y)


def amax_of_rows(x: Tensor) -> Tensor:
    """Return the largest absolute value of each row: x [..., k] -> [..., 1], fp32."""
    return x.abs().amax(dim=-1, keepdim=True).to(torch.float32)


def cast_by_row_amax(x: Tensor, amax: Tensor) -> Scaled:
    """Cast x [..., k] to e4m3. The scale of each row is computed from the row's `amax` [..., 1]."""
    multiplier = multiplier_of(amax, torch.finfo(E4M3).max)
    return Scaled(round_scaled(x, multiplier, E4M3), multiplier.reciprocal())


def cast_by_rows(x: Tensor) -> Scaled:
    """Cast x [..., k] to e4m3, each row scaled by its largest value."""
    return cast_by_row_amax(x, amax_of_rows(x))


def blocks_of(matrices: Tensor, transpose: bool = False) -> Scaled:
    """Cast matrices [experts, m, k], or their transposes, by blocks of 128 x 128."""
    blocks = [cast_by_blocks(matrix, TILE, E4M3) for matrix in matrices]
    if transpose:
        blocks = [Scaled(transposed(block.values), block.scale.t()) for block in blocks]
    values, scales = zip(*blocks, strict=True)
    return Scaled(torch.stack([part.view(torch.uint8) for part in values]).view(E4M3), torch.stack(scales))


class ExpertTiles(NamedTuple):
    """e4m3 cast of rows x [n, k], stored as its transpose. The rows are sorted by expert. A tile consists of 128 rows
    of an expert. Each column of a tile has a separate scale. Each expert's rows are padded with zeros to whole tiles.
    The number of tiles suffices for any distribution of n rows over the experts. The contents of unused tiles are
    undefined."""

    values: Tensor
    """The values in e4m3, [k, 128 * tiles]."""
    scale: Tensor
    """fp32 scales [tiles, k], one for each column of each tile. All scales are powers of two."""
    rows: int
    """Number of rows n, excluding padding."""


def tiles_for(rows: int, experts: int) -> int:
    """Return a number of tiles that is sufficient for any distribution of `rows` rows over the experts."""
    return rows // TILE + experts


@operation
def cast_along_tokens(x: Tensor, ends: Tensor, tile_ends: Tensor, compiled: bool) -> ExpertTiles:
    """Cast x [n, k] to e4m3 by tiles of 128 rows (tokens) of the same expert. Each column of a tile has its own scale.

    Args:
        x: Rows [n, k], sorted by expert.
        ends: Index after the last row of each expert. Expert e has the rows [ends[e - 1], ends[e]).
        tile_ends: Index after the last tile of each expert. Expert e has the tiles [tile_ends[e - 1], tile_ends[e]).
        compiled: Whether to use a compiled region.
    """
    return ExpertTiles(*region(cast_along_tokens_twin, compiled)(x, ends, tile_ends), x.shape[0])


def cast_along_tokens_twin(x: Tensor, ends: Tensor, tile_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the values and the scale of `cast_along_tokens` in plain torch."""
    (rows, k), tiles = x.shape, tiles_for(x.shape[0], ends.shape[0])
    place = torch.arange(TILE * tiles, device=x.device)
    experts = torch.searchsorted(tile_ends, place // TILE, right=True, out_int32=True).clamp(max=ends.shape[0] - 1)
    starts, tile_starts = (F.pad(each[:-1], (1, 0)).long() for each in (ends, tile_ends))
    row = place + (starts - TILE * tile_starts)[experts]
    padded = torch.where((row < ends[experts])[:, None], x[row.clamp(max=rows - 1)], 0.0)
    blocks = padded.view(tiles, TILE, k)
    multiplier = power_of_two(multiplier_of(blocks.abs().amax(dim=1).to(torch.float32), torch.finfo(E4M3).max))
    values = transposed(round_scaled(blocks, multiplier[:, None, :], E4M3).view(-1, k))
    return values, multiplier.reciprocal()


@operation
@torch_function
def add_fp8_products_grouped_(out: Tensor, dy: ExpertTiles, x: ExpertTiles, tile_ends: Tensor) -> None:
    """Add weight gradients in place: out[e] [o, i] += dy_e x_eᵀ for each expert e. If there is no fp8 kernel, the fp8
    values are multiplied in 16 bits on GPUs, and in fp32 on CPUs.

    Args:
        out: Gradient sums [experts, o, i].
        dy: Casts of the output gradients, from `cast_along_tokens`.
        x: Casts of the inputs, from `cast_along_tokens`.
        tile_ends: Index after the last tile of each expert.
    """
    add_products_of_tiles_(out, dy, x, tile_ends, torch.bfloat16 if multiplies_in_fp8(out) else torch.float32)


def add_products_of_tiles_(out: Tensor, dy: ExpertTiles, x: ExpertTiles, tile_ends: Tensor, dtype: torch.dtype) -> None:
    """Compute the result of `add_fp8_products_grouped_` from operands that are dequantized to `dtype`."""
    padded = Segments.of_counts(TILE * torch.diff(tile_ends, prepend=tile_ends.new_zeros(1)), spare=True)
    add_products_grouped_(out, rows_of_tiles(dy, dtype), rows_of_tiles(x, dtype), padded)


def rows_of_tiles(tiles: ExpertTiles, dtype: torch.dtype) -> Tensor:
    """Dequantize the tiles of a cast. Returns the rows [128 * tiles, k]. 16-bit dtypes represent these rows exactly,
    because e4m3 has fewer mantissa bits and the scales are powers of two."""
    scale = tiles.scale.to(dtype).repeat_interleave(TILE, dim=0)
    return tiles.values.t().to(dtype) * scale


AddWeightGrad = Callable[[Tensor, Tensor, Tensor, Segments], None]
"""Function of (out [experts, out, in], dY [n, out], x [n, in], segments) that computes out += dYᵀ X for each expert."""


class Fp8GroupedGemms:
    """fp8 products of a grouped linear layer: y = x Wᵀ, dX = dY W and dW = dYᵀ X, with W [experts, ..., in].

    `cuts` states which features are sharded over `expt_tp`. If the features of a row are sharded, the scale of the row
    is still computed from the whole row. If `in_one_kernel` is True, GPUs compute the products of all experts in one
    kernel (`has_grouped_fp8_kernel`). Otherwise, each expert's product is computed by a separate kernel.

    The weight gradient is a sum over tokens. Therefore, the operands of its product are cast in tiles of 128 rows of
    the same expert. The parallel layout determines which tokens share a tile, but has little effect on the cast values.
    Multipliers are powers of two, so that the mantissa of a value does not depend on the multiplier. Only values below
    2^-13 of the largest value in a tile lose bits. `add_bias_grad_` computes the gradient of a bias in 16 bits.
    """

    def __init__(
        self,
        fp8: Fp8Context,
        expt_tp: Axis,
        cuts: Cuts,
        in_one_kernel: bool,
        compiled: bool,
        add_bias_grad_: AddWeightGrad,
    ) -> None:
        self.add_bias_grad_ = add_bias_grad_
        self.casts = fp8.casts
        self.expt_tp = expt_tp
        self.cuts = cuts
        self.compiled = compiled
        self.in_blocks = fp8.config.fp8_recipe == "blockwise"
        self.in_one_kernel = in_one_kernel

    def forward(self, x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        """Compute the output y: x [n, in] -> y [n, out]."""
        matrices = self.casts.get(weight, "rows", lambda: self._weight(weight, False))
        return grouped_scaled_mm(self._rows(x, self.cuts.inputs), matrices, segments, x.dtype, self.in_one_kernel)

    def input_grad(self, dy: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        """Compute the input gradient dX: dY [n, out] -> dX [n, in]."""
        matrices = self.casts.get(weight, "columns", lambda: self._weight(weight, True))
        return grouped_scaled_mm(self._rows(dy, self.cuts.outputs), matrices, segments, dy.dtype, self.in_one_kernel)

    def add_weight_grad_(self, out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> None:
        """Add the weight gradient of each expert in place: out [experts, out, in] += dY [n, out]ᵀ x [n, in]."""
        if not x.shape[0]:
            return
        tile_ends = segments.padded(TILE).ends // TILE
        ends, compiled = segments.ends, self.compiled
        of_dy = cast_along_tokens(dy.detach(), ends, tile_ends, compiled)
        of_x = cast_along_tokens(x.detach(), ends, tile_ends, compiled)
        add_fp8_products_grouped_(out, of_dy, of_x, tile_ends)

    def _rows(self, x: Tensor, cut: bool) -> Scaled:
        """Cast x [n, k] with one scale for each row or, under the blockwise recipe, for each 128 values of a row. The
        compiled cast has dynamic shapes, because the number of rows differs from call to call."""
        x = x.detach()
        if self.in_blocks:
            return region(cast_by_blocks, self.compiled and x.shape[1] % TILE == 0)(x, 1, E4M3)
        return self._by_rows(x, cut)

    def _by_rows(self, x: Tensor, cut: bool) -> Scaled:
        if not cut:
            return region(cast_by_rows, self.compiled)(x)
        amax = all_reduce_(region(amax_of_rows, self.compiled)(x), self.expt_tp, dist.ReduceOp.MAX)
        return region(cast_by_row_amax, self.compiled)(x, amax)

    def _weight(self, weight: Tensor, transpose: bool) -> Scaled:
        """Return the weight W [experts, out, in] or, with `transpose`, its transpose [experts, in, out], cast along the
        last dimension."""
        matrices = weight.detach().view(weight.shape[0], -1, weight.shape[-1])
        if self.in_blocks:
            return blocks_of(matrices, transpose)
        cut = self.cuts.outputs if transpose else self.cuts.inputs
        return self._by_rows(matrices.transpose(1, 2) if transpose else matrices, cut)
