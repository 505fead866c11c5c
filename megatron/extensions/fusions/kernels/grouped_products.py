"""Products of the rows of experts, whose numbers only the device knows.

torch's grouped GEMM covers the forward pass and the gradients of inputs. Weight gradients are added in fp32 to what is
there, which it does not do; and it leaves rows that belong to no expert as the memory was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.moe.experts import Segments, add_products_grouped_, clear_rows_behind_
from megatron.extensions.fusions.kernel_choice import FusedKernel, RunShapes, runs_triton, triton_operator

_add_products = triton_operator(
    "kernels.products_triton:add_grouped_products_", "(Tensor(a!) out, Tensor dy, Tensor x, Tensor ends) -> ()"
)
"""out[e] [o, i] += dy_e [n_e, o]ᵀ x_e [n_e, i] for each expert e, summed in fp32 whatever the operands are.

out [experts, o, i], dy [n, o], x [n, i], contiguous. Expert e has the rows from ends[e - 1] to ends[e] (int32)."""

_clear_rows = triton_operator("kernels.products_triton:clear_rows_behind_", "(Tensor(a!) x, Tensor ends) -> ()")
"""Sets the rows of x [n, width], contiguous, from ends[-1] (int32) on to zero. Touches no others."""


def _samples(shapes: RunShapes) -> Iterator[tuple[Any, ...]]:
    if shapes.experts and shapes.dtype == torch.bfloat16:
        counts = torch.full((shapes.experts,), shapes.tokens // shapes.experts - 1, device=shapes.device)
        segments = Segments.of_counts(counts, spare=True)
        out = torch.zeros(shapes.experts, shapes.ffn, shapes.hidden, device=shapes.device)
        yield out, shapes.random(shapes.tokens, shapes.ffn), shapes.random(shapes.tokens, shapes.hidden), segments


ADD_PRODUCTS = FusedKernel(
    lambda out, dy, x, segments: _add_products(out, dy, x, segments.ends),
    add_products_grouped_,
    lambda out, dy, x, segments: runs_triton(x),
    _samples,
    2.0**-7,
)
CLEAR_ROWS = FusedKernel(
    _clear_rows,
    clear_rows_behind_,
    lambda x, ends: runs_triton(x),
    lambda shapes: ((x, segments.ends) for _, _, x, segments in _samples(shapes)),
    0.0,
)
