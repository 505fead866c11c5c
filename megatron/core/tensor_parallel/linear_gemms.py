"""The three GEMMs of a linear layer: y = x Wᵀ, dX = dY W and dW = dYᵀ X.

`LinearFunction` decides when they run and what the ranks exchange; a `LinearGemms` decides their precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parts import operation
from megatron.core.tensor_parallel.weight_grad import add_product_

Operand = tuple[Tensor, ...]
"""An activation as a GEMM reads it, in tensors that its `LinearGemms` knows. A sequence-parallel gather gathers them
along dim 0: the first has the activation's shape, the others (fp8 scales) its sequence. A scalar holds for all."""


class Operands(NamedTuple):
    """An activation, or its gradient, as the two GEMMs that multiply it read it. They may share tensors."""

    output: Operand
    """For Y, or for dX."""

    weight_grad: Operand
    """For dW. Of an input it is what is saved for the backward."""


@dataclass(frozen=True)
class Cuts:
    """Which operands of a linear layer are sharded over the tensor-parallel ranks."""

    sequence: bool = False
    """The input along the sequence; it is gathered before the GEMM."""

    inputs: bool = False
    """The input features, and the weight along them (row parallel)."""

    outputs: bool = False
    """The output features, and the weight along them (column parallel)."""

    tokens: bool = False
    """Input and output along the sequence, without a gather; the weight is whole."""


class LinearGemms(Protocol):
    """The GEMMs of one linear layer in one precision."""

    adds_residual: bool
    """Whether `forward` takes an addend."""

    def cast_input(self, x: Tensor, needs_dw: bool) -> Operands:
        """Casts x [s, b, in], before a gather. Without `needs_dw` no weight gradient will be asked for."""

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None) -> Tensor:
        """x [s, b, in], weight [..., in], bias [out] -> y [s, b, out]; y + addend, rounded once, with an addend
        [s, b, out]."""

    def cast_grad(self, dy: Tensor, needs_dw: bool) -> Operands:
        """Casts dY [s, b, out], after a gather."""

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        """dY [s, b, out], weight [..., in] -> dX [s, b, in]"""

    def add_weight_grad_(self, out: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """out [out, in] += dYᵀ X; with `overwrite` out = dYᵀ X"""


@operation
def residual_gemm(
    x: Tensor,
    weight: Tensor,
    addend: Tensor,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """addend [n, m] + x [n, k] weight [m, k]ᵀ + bias [m] -> [n, m], summed in fp32 and rounded once to the addend's
    dtype. fp8 operands have `scales` [], of x and of the weight."""
    wide = torch.promote_types(addend.dtype, torch.float32)
    total = F.linear(x.to(wide), weight.to(wide))
    total = total if scales is None else total * (scales[0] * scales[1])
    total = total if bias is None else total + bias.to(wide)
    return (total + addend.to(wide)).to(addend.dtype)


class PlainGemms:
    """GEMMs in the precision of the parameters."""

    adds_residual = True

    def cast_input(self, x: Tensor, needs_dw: bool) -> Operands:
        return Operands((x,), (x,))

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None) -> Tensor:
        if addend is None:
            return F.linear(x[0], matrix_of(weight), bias)
        return residual_gemm(rows_of(x[0]), matrix_of(weight), rows_of(addend), bias).view(addend.shape)

    def cast_grad(self, dy: Tensor, needs_dw: bool) -> Operands:
        return Operands((dy,), (dy,))

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        return dy[0].matmul(matrix_of(weight))

    def add_weight_grad_(self, out: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        add_product_(out, rows_of(dy[0]), rows_of(x[0]), overwrite)


PLAIN = PlainGemms()


def matrix_of(weight: Tensor) -> Tensor:
    """[..., in] -> [out, in], a view"""
    return weight.view(-1, weight.shape[-1])


def rows_of(x: Tensor) -> Tensor:
    """[s, b, n] -> [s * b, n]"""
    return x.reshape(-1, x.shape[-1])
