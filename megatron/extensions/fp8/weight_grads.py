"""Adds weight gradients of fp8 layers to fp32 sums."""

from __future__ import annotations

from torch import Tensor

from megatron.core.parts import operation
from megatron.extensions.fp8.casts import Scaled, scaled_mm


@operation
def add_fp8_product_(out: Tensor, dy: Scaled, x: Scaled, overwrite: bool) -> None:
    """out [o, i] += dy x^T, for dy [o, n] and x [i, n] cast by columns. With `overwrite` out = dy x^T."""
    product = scaled_mm(dy, x, out.dtype)
    out.copy_(product) if overwrite else out.add_(product)
