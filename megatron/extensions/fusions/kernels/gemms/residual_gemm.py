"""The product of a linear layer added to the residual stream where it is computed: y = addend + x Wᵀ + bias.

The sum is rounded once, where a product that is added later is rounded twice. torch's `addmm` would copy the addend
into the output before it adds to that; cuBLASLt reads it as the product's matrix C and writes another one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.linear_gemms import residual_gemm
from megatron.extensions.fusions.kernel_choice import FusedKernel

SIZES = 16
"""Features of both sides are multiples of this, as fp8 products and aligned rows need it."""


def adds_residual(x: Tensor | None, weight: Tensor, *_: Any) -> bool:
    """Whether products with a `weight` [m, k] in 16 bits may be `residual_gemm`, for their operands' device and
    sizes."""
    return weight.is_cuda and weight.itemsize == 2 and weight.shape[0] % SIZES == 0 and weight.shape[-1] % SIZES == 0


def _computed(
    x: Tensor,
    weight: Tensor,
    addend: Tensor,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """What cuBLASLt does not support is a product of torch's and an addition."""
    return _residual_gemm(x.contiguous(), weight, addend.contiguous(), bias, *(scales or (None, None)))


def residual_sum(
    x: Tensor, weight: Tensor, addend: Tensor, bias: Tensor | None, scales: tuple[Tensor, Tensor] | None
) -> Tensor:
    """A product of torch's, rounded, and then the sum."""
    if scales is None:
        return F.linear(x, weight, bias).add_(addend)
    product = torch._scaled_mm(x, weight.t(), *scales, bias=bias, out_dtype=addend.dtype, use_fast_accum=True)
    return product.add_(addend)


@torch.library.custom_op("megatron::residual_gemm", mutates_args=())
def _residual_gemm(
    x: Tensor, weight: Tensor, addend: Tensor, bias: Tensor | None, x_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    scales = None if x_scale is None or weight_scale is None else (x_scale, weight_scale)
    if not x.is_cuda:
        return residual_gemm.__wrapped__(x, weight, addend, bias, scales)  # type: ignore[attr-defined]
    from megatron.extensions.fusions.kernels.gemms import cublaslt

    try:
        return cublaslt.residual_product(x, weight, addend, bias, scales)
    except RuntimeError:
        return residual_sum(x, weight, addend, bias, scales)


@_residual_gemm.register_fake
def _(
    x: Tensor, weight: Tensor, addend: Tensor, bias: Tensor | None, x_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    return torch.empty_like(addend)


RESIDUAL_GEMM = FusedKernel(_computed, residual_gemm, adds_residual, lambda shapes: (), 2.0**-7)
"""Compared by layer, in `residual_choice.py`."""
