"""The three GEMMs of a linear layer: y = x Wᵀ, dX = dY W and dW = dYᵀ X.

`LinearFunction` decides when they run and what the ranks exchange; a `LinearGemms` decides their precision. Operands
are `Operand` tuples: the first tensor has the shape of the activation and is what a sequence-parallel gather gathers,
along dim 0; the others (fp8 scales) hold for the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.weight_grad import add_product_

Operand = tuple[Tensor, ...]


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

    def cast_input(self, x: Tensor) -> Operand:
        """x [s, b, in] as it is saved for backward. Its first tensor is gathered before the GEMM."""

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [s, b, in], weight [..., in], bias [out] -> y [s, b, out]"""

    def cast_grad(self, dy: Tensor) -> Operand:
        """dY [s, b, out] as both GEMMs of the backward read it."""

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        """dY [s, b, out], weight [..., in] -> dX [s, b, in]"""

    def add_weight_grad_(self, out: Tensor, dy: Operand, x: Operand) -> None:
        """out [out, in] += dYᵀ X"""


class PlainGemms:
    """GEMMs in the precision of the parameters."""

    def cast_input(self, x: Tensor) -> Operand:
        return (x,)

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x[0], matrix_of(weight), bias)

    def cast_grad(self, dy: Tensor) -> Operand:
        return (dy,)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        return dy[0].matmul(matrix_of(weight))

    def add_weight_grad_(self, out: Tensor, dy: Operand, x: Operand) -> None:
        add_product_(out, rows_of(dy[0]), rows_of(x[0]))


PLAIN = PlainGemms()


def matrix_of(weight: Tensor) -> Tensor:
    """[..., in] -> [out, in], a view"""
    return weight.view(-1, weight.shape[-1])


def rows_of(x: Tensor) -> Tensor:
    """[s, b, n] -> [s * b, n]"""
    return x.reshape(-1, x.shape[-1])
