"""Adds weight gradients of fp8 layers to fp32 sums."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.fp8.casts import Scaled, scaled_mm
from megatron.core.kernels.availability import runs_triton
from megatron.core.kernels.gemms.cublaslt import ALIGNMENT
from megatron.core.kernels.gemms.fp8_weight_grad import KERNELS, add_fp8_product_

TORCH = "torch"
"""The kernel that writes a product, which is then added."""


@dataclass(frozen=True, order=True)
class ProductShape:
    """dW [outputs, inputs] summed over tokens."""

    outputs: int
    inputs: int
    tokens: int


@dataclass
class WeightGradProducts:
    """The kernels of weight gradients by shape, as `weight_grad_choice` found them; Triton's where it has not."""

    chosen: dict[ProductShape, str] = field(default_factory=dict)

    def add_(self, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool = False) -> None:
        """out [o, i] += dy x^T, for dy [o, n] and x [i, n] cast by columns. With `overwrite` out = dy x^T."""
        outputs, inputs = out.shape
        kernel = self.chosen.get(ProductShape(outputs, inputs, dy.values.shape[1]), KERNELS[0])
        fits = runs_triton(out) and out.dtype == torch.float32 and out.is_contiguous()
        if fits and kernel == "cublaslt":  # was timed on aligned sums; a buffer may hold others
            fits = out.data_ptr() % ALIGNMENT == 0
        add_product_(kernel if fits else TORCH, out, dy, x, overwrite)


def add_product_(kernel: str, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool = False) -> None:
    """`WeightGradProducts.add_` by a kernel: "torch" or one of `KERNELS`."""
    if kernel == TORCH:
        product = scaled_mm(dy, x, out.dtype)
        out.copy_(product) if overwrite else out.add_(product)
    else:
        add_fp8_product_(out, dy.values, x.values, dy.scale, x.scale, kernel, overwrite)
