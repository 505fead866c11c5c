"""Products of the rows of experts, whose numbers only the device knows.

torch's grouped GEMM covers the forward pass and the gradients of inputs. Weight gradients are added in fp32 to what is
there, which it does not do; and it leaves rows that belong to no expert as the memory was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.moe.experts import Segments, add_products_grouped_, clear_rows_behind_
from megatron.extensions.fusions.kernel_choice import FusedKernel, RunShapes, runs_triton


@torch.library.custom_op("megatron::add_grouped_products_", mutates_args=("out",), device_types="cuda")
def add_grouped_products_(out: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """out[e] [o, i] += dy_e [n_e, o]ᵀ x_e [n_e, i] for each expert e, summed in fp32 whatever the operands are.

    out [experts, o, i], dy [n, o], x [n, i], contiguous. Expert e has the rows from ends[e - 1] to ends[e] (int32).
    """
    from megatron.extensions.fusions.kernels.gemms import grouped_products_triton as kernels

    kernels.add_grouped_products_(out, dy, x, ends)


@torch.library.custom_op("megatron::clear_rows_behind_", mutates_args=("x",), device_types="cuda")
def _clear_rows_behind_(x: Tensor, ends: Tensor) -> None:
    """Sets the rows of x [n, width], contiguous, from ends[-1] (int32) on to zero. Touches no others."""
    from megatron.extensions.fusions.kernels.gemms import grouped_products_triton as kernels

    kernels.clear_rows_behind_(x, ends)


for _operator in (add_grouped_products_, _clear_rows_behind_):
    _operator.register_fake(lambda *operands: None)


def _samples(shapes: RunShapes) -> Iterator[tuple[Any, ...]]:
    if shapes.experts and shapes.dtype == torch.bfloat16:
        counts = torch.full((shapes.experts,), shapes.tokens // shapes.experts - 1, device=shapes.device)
        segments = Segments.of_counts(counts, spare=True)
        out = torch.zeros(shapes.experts, shapes.ffn, shapes.hidden, device=shapes.device)
        yield out, shapes.random(shapes.tokens, shapes.ffn), shapes.random(shapes.tokens, shapes.hidden), segments


ADD_PRODUCTS = FusedKernel(
    lambda out, dy, x, segments: add_grouped_products_(out, dy, x, segments.ends),
    add_products_grouped_,
    lambda out, dy, x, segments: runs_triton(x),
    _samples,
    2.0**-7,
)
CLEAR_ROWS = FusedKernel(
    _clear_rows_behind_,
    clear_rows_behind_,
    lambda x, ends: runs_triton(x),
    lambda shapes: ((x, segments.ends) for _, _, x, segments in _samples(shapes)),
    0.0,
)
