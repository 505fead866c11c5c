"""Products of the rows of experts, whose numbers only the device knows.

torch's grouped GEMM covers the forward pass and the gradients of inputs. Weight gradients are added in fp32 to what is
there, which it does not do; and it leaves rows that belong to no expert as the memory was.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("megatron::add_grouped_products_", mutates_args=("out",), device_types="cuda")
def add_grouped_products_(out: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """out[e] [o, i] += dy_e [n_e, o]ᵀ x_e [n_e, i] for each expert e, summed in fp32 whatever the operands are.

    out [experts, o, i], dy [n, o], x [n, i], contiguous. Expert e has the rows from ends[e - 1] to ends[e] (int32).
    """
    from megatron.core.kernels.gemms import grouped_products_triton as kernels

    kernels.add_grouped_products_(out, dy, x, ends)


@torch.library.custom_op("megatron::clear_rows_behind_", mutates_args=("x",), device_types="cuda")
def clear_rows_behind_(x: Tensor, ends: Tensor) -> None:
    """Sets the rows of x [n, width], contiguous, from ends[-1] (int32) on to zero. Touches no others."""
    from megatron.core.kernels.gemms import grouped_products_triton as kernels

    kernels.clear_rows_behind_(x, ends)


@add_grouped_products_.register_fake
def _(out: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    pass


@clear_rows_behind_.register_fake
def _(x: Tensor, ends: Tensor) -> None:
    pass
