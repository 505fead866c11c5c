"""Casts and sums of a linear layer's tensors that its neighbours make, where they have these in registers.

What computes a layer's input may cast it: a tensor without values then stands in for the input (`given_input`). In the
backward, what reads the layer's output casts the gradient of that, and sums it up for the bias (`OutputGradient`).
Where no neighbour does, the layer does it itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fp8.cast_transpose import CastOrder, CastPair
from megatron.core.fp8.recipes import DelayedGemms
from megatron.core.tensor_parallel.linear_gemms import LinearGemms, Operands


def given_input(x: Tensor) -> Operands | None:
    """The casts that a stand-in carries; None for a tensor that has values."""
    return getattr(x, "given_casts", None)


class OutputGradient:
    """The gradient dY of a linear layer's output, about which the backward before the layer's can tell it more."""

    def __init__(self, gemms: LinearGemms, needs_dw: bool, needs_sum: bool) -> None:
        self.gemms, self.needs_dw = gemms, needs_dw
        self.needs_sum = needs_sum
        """Whether the sum over tokens is of use, the gradient of a bias."""
        self._made: tuple[Tensor, int, Operands | None, Tensor | None] | None = None

    def order(self) -> CastOrder | None:
        """The casts of dY that the layer's GEMMs will read. None where they read dY itself, or scales are not known
        before."""
        return self.gemms.grad_order(self.needs_dw) if isinstance(self.gemms, DelayedGemms) else None

    def put(self, grad: Tensor, pair: CastPair | None, row_sum: Tensor | None) -> None:
        """Hands over what was made of dY [s, b, ...]: casts as `order` says, and the sum over tokens."""
        operands = None
        if pair is not None:
            assert isinstance(self.gemms, DelayedGemms)
            operands = self.gemms.given_grad(pair, grad.shape[:2])
        self._made = grad, grad._version, operands, row_sum

    def put_stand_in(self, pair: CastPair, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """`put` in place of a gradient [s, b, ...] that nobody else reads: returns a tensor of NaN of its shape."""
        assert isinstance(self.gemms, DelayedGemms)
        grad = self.gemms.no_value(dtype).expand(shape)
        self.put(grad, pair, None)
        return grad

    def take(self, grad: Tensor) -> tuple[Operands | None, Tensor | None]:
        """(casts, sum over tokens) of `grad`, each None where it was not made, or made of another tensor: dY is that
        alone if nothing was added to it on its way."""
        made, self._made = self._made, None
        if made is None or not _same_values(made[0], made[1], grad):
            return None, None
        return made[2:]


def attach(y: Tensor, gradient: OutputGradient | None) -> Tensor:
    """Lets what reads y, the output of a layer, find its `OutputGradient`."""
    if gradient is not None:
        y.output_gradient = gradient  # type: ignore[attr-defined]
    return y


def gradient_of_output(y: Tensor | None) -> OutputGradient | None:
    return getattr(y, "output_gradient", None)


def _same_values(made: Tensor, version: int, grad: Tensor) -> bool:
    """Whether `grad` is `made`, or a view of all of it, unchanged since."""
    storages = (x.untyped_storage()._cdata for x in (made, grad))
    places = {(storage, x.storage_offset(), x.numel()) for storage, x in zip(storages, (made, grad), strict=True)}
    return len(places) == 1 and made._version == version
