"""Mutants of norms, rotations and activations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.transformer import activations, norm
from tests.parity.mutants.common import mutant, plant


@mutant(activations, "_biased_backward", world="2", tp="2", regions="fused")
def _bias_gradient_of_some_rows(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Gradient of a bias before an activation from a part of the rows."""
    dx, _ = _true_biased_backward(x, *args)
    return dx, dx[1:].sum((0, 1))


_true_biased_backward = activations._biased_backward

plant(
    "Sum of squares of a rank's own heads",
    (norm, "reduce_from", lambda x, axis: x),
    world="2",
    tp="2",
    block="wide norms",
)
plant(
    "Gradient of the sum of squares from a rank's own heads",
    (norm, "copy_to", lambda x, axis: x),
    world="2",
    tp="2",
    block="wide norms",
)
