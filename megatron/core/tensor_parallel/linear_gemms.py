"""The three matrix products of a linear layer: y = x Wᵀ, dX = dY W and dW = dYᵀ X.

`LinearFunction` says when they are computed and what is sent between ranks; a `Products` says in which precision. What
is multiplied comes as `Parts`: the first has the shape of the activation, and what stands for a part of the sequence is
gathered along its first dim; the others belong to all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.weight_grad import add_product_

Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Cuts:
    """What of a linear layer's tensors the tensor-parallel ranks have parts of."""

    sequence: bool = False
    """The sequence of inputs, which are gathered."""

    inputs: bool = False
    """The features of inputs, and the weight along them."""

    outputs: bool = False
    """The features of outputs, and the weight along them."""


class Products(Protocol):
    """What a linear layer multiplies in."""

    def cast_input(self, x: Tensor) -> Parts:
        """x [s, b, in] as it is kept for the backward; its first part is gathered before it is multiplied."""
        ...

    def forward(self, x: Parts, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s, b, in], weight [..., in], bias [out] -> [s, b, out]"""
        ...

    def cast_grad(self, dy: Tensor) -> Parts:
        """dY [s, b, out] as the two products of the backward take it."""
        ...

    def input_grad(self, dy: Parts, weight: Tensor) -> Tensor:
        """[s, b, out] -> dX [s, b, in]"""
        ...

    def add_weight_grad_(self, out: Tensor, dy: Parts, x: Parts) -> None:
        """out [out, in] += dYᵀ X"""
        ...


class PlainProducts:
    """In the numbers of the parameters."""

    def cast_input(self, x: Tensor) -> Parts:
        return (x,)

    def forward(self, x: Parts, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x[0], matrix_of(weight), bias)

    def cast_grad(self, dy: Tensor) -> Parts:
        return (dy,)

    def input_grad(self, dy: Parts, weight: Tensor) -> Tensor:
        return dy[0].matmul(matrix_of(weight))

    def add_weight_grad_(self, out: Tensor, dy: Parts, x: Parts) -> None:
        add_product_(out, rows_of(dy[0]), rows_of(x[0]))


PLAIN = PlainProducts()


def matrix_of(weight: Tensor) -> Tensor:
    """[..., in] -> [out, in], a view"""
    return weight.view(-1, weight.shape[-1])


def rows_of(x: Tensor) -> Tensor:
    """[s, b, n] -> [s * b, n]"""
    return x.reshape(-1, x.shape[-1])
