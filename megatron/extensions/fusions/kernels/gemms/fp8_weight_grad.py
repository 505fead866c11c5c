"""Products in fp8 that are added to an fp32 gradient where they are computed.

torch's fp8 GEMM cannot add to its output: its product is written in fp32, and an addition reads it and both reads and
writes the gradient. Here a GEMM reads and writes the gradient once. Neither kernel has run on a GPU yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

KERNELS = ("triton", "cublaslt")


@torch.library.custom_op("megatron::add_fp8_product_", mutates_args=("out",), device_types="cuda")
def add_fp8_product_(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, kernel: str, overwrite: bool = False
) -> None:
    """out [o, i] += (a * a_scale) (b * b_scale)ᵀ, summed in fp32, by one of `KERNELS`; with `overwrite` = it.

    out is fp32; a [o, n] and b [i, n] are fp8. Scales are fp32: [], or for "triton" also [o, 1] and [i, 1], or of tiles
    of 128, [o, n / 128] and [i, n / 128]. All are contiguous. Raises RuntimeError where a kernel does not support the
    operands.
    """
    if kernel == "triton":
        from megatron.extensions.fusions.kernels.gemms import fp8_weight_grad_triton

        fp8_weight_grad_triton.add_product_(out, a, b, a_scale, b_scale, overwrite)
    else:
        from megatron.extensions.fusions.kernels.gemms import cublaslt

        cublaslt.add_product_(out, a, b, a_scale, b_scale, overwrite)


@add_fp8_product_.register_fake
def _(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, kernel: str, overwrite: bool = False
) -> None:
    pass
