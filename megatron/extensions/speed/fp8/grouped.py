"""fp8 GEMMs of mixture-of-experts layers: rows that are sorted by expert, times the matrices of their experts.

Activations and their gradients are scaled by rows of the features, one token's each, so that no scale depends on the
other tokens of a micro-batch. The kernel for all experts at once takes scales of rows, and e4m3 alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import all_reduce_
from megatron.core.compiled_regions import region
from megatron.core.moe.grouped_gemms import Segments
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.linear_gemms import Cuts
from megatron.core.torch_private import scaled_grouped_mm
from megatron.extensions.speed.fp8.blockwise import cast_by_blocks
from megatron.extensions.speed.fp8.casts import (
    E4M3,
    TILE,
    Scaled,
    multiplier_of,
    round_scaled,
    scaled_mm,
    transposed,
)
from megatron.extensions.speed.fp8.recipes import Fp8Context

GROUPED_CAPABILITIES = ((9, 0), (10, 0))
"""Compute capabilities of the GPUs whose grouped kernel takes fp8 with scales of rows."""


def has_grouped_fp8_kernel(recipe: str, device: torch.device) -> bool:
    """Return whether one kernel multiplies all experts in fp8, and reads the numbers of rows on the device."""
    if device.type != "cuda":
        return recipe != "blockwise"
    return recipe != "blockwise" and torch.cuda.get_device_capability(device) in GROUPED_CAPABILITIES


def grouped_scaled_mm(a: Scaled, b: Scaled, segments: Segments, out_dtype: torch.dtype, in_one_kernel: bool) -> Tensor:
    """fp8 GEMM of each expert: a [n, k], b [experts, m, k] -> a_e b_eᵀ [n, m] in `out_dtype`, spare rows 0.

    The kernel for all experts returns bf16 whatever `out_dtype`.
    """
    y = a.scale.new_empty((a.values.shape[0], b.values.shape[1]), dtype=out_dtype)
    if not a.values.shape[0]:
        return y
    if a.values.is_cuda and in_one_kernel:
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
    """Largest absolute value of each row: x [..., k] -> [..., 1], fp32."""
    return x.abs().amax(dim=-1, keepdim=True).to(torch.float32)


def cast_by_row_amax(x: Tensor, amax: Tensor) -> Scaled:
    """Casts x [..., k] to e4m3, each row scaled by its `amax` [..., 1]."""
    multiplier = multiplier_of(amax, torch.finfo(E4M3).max)
    return Scaled(round_scaled(x, multiplier, E4M3), multiplier.reciprocal())


def cast_by_rows(x: Tensor) -> Scaled:
    """Casts x [..., k] to e4m3, each row scaled by its largest value."""
    return cast_by_row_amax(x, amax_of_rows(x))


AddWeightGrad = Callable[[Tensor, Tensor, Tensor, Segments], None]
"""(out [experts, out, in], dY [n, out], x [n, in], segments): out += dYᵀ X of each expert."""


class Fp8GroupedGemms:
    """The products of a grouped linear layer with rows, y = x Wᵀ and dX = dY W, in fp8. W [experts, ..., in].

    `cuts` says which features are sharded over `expt_tp`: the scale of a row that is cut follows from the whole row.
    With `in_one_kernel` GPUs multiply all experts at once (`has_grouped_fp8_kernel`), else one by one.
    `add_weight_grad_` computes the third product, in 16 bits: it sums over tokens, and scales along them would depend
    on which tokens an expert is given at once.
    """

    def __init__(
        self,
        fp8: Fp8Context,
        expt_tp: Axis,
        cuts: Cuts,
        in_one_kernel: bool,
        compiled: bool,
        add_weight_grad_: AddWeightGrad,
    ) -> None:
        self.add_weight_grad_ = add_weight_grad_
        self.casts = fp8.casts
        self.expt_tp = expt_tp
        self.cuts = cuts
        self.compiled = compiled
        self.in_blocks = fp8.config.fp8_recipe == "blockwise"
        self.in_one_kernel = in_one_kernel

    def forward(self, x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        """x [n, in] -> [n, out]"""
        matrices = self.casts.get(weight, "rows", lambda: self._weight(weight, False))
        return grouped_scaled_mm(self._rows(x, self.cuts.inputs), matrices, segments, x.dtype, self.in_one_kernel)

    def input_grad(self, dy: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        """dY [n, out] -> [n, in]"""
        matrices = self.casts.get(weight, "columns", lambda: self._weight(weight, True))
        return grouped_scaled_mm(self._rows(dy, self.cuts.outputs), matrices, segments, dy.dtype, self.in_one_kernel)

    def _rows(self, x: Tensor, cut: bool) -> Scaled:
        """Casts x [n, k] by rows, or by tiles of 128 of them. Numbers of rows change: regions are not static."""
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
        """W as [experts, out, in], or [experts, in, out] with `transpose`, cast along its last dimension."""
        matrices = weight.detach().view(weight.shape[0], -1, weight.shape[-1])
        if self.in_blocks:
            blocks = [cast_by_blocks(matrix, TILE, E4M3) for matrix in matrices]
            if transpose:
                blocks = [Scaled(transposed(block.values), block.scale.t()) for block in blocks]
            values, scales = zip(*blocks, strict=True)
            return Scaled(torch.stack([part.view(torch.uint8) for part in values]).view(E4M3), torch.stack(scales))
        cut = self.cuts.outputs if transpose else self.cuts.inputs
        return self._by_rows(matrices.transpose(1, 2) if transpose else matrices, cut)
