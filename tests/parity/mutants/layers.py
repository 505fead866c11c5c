"""Mutants of norms, rotations and activations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.transformer import activations, norm
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants


def _bias_gradient_of_some_rows(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    dx, _ = _true_biased_backward(x, *args)
    return dx, dx[1:].sum((0, 1))


_true_biased_backward = activations._biased_backward

MUTANTS: Mutants = {
    "sum of squares of a rank's own heads": (
        [(norm, "reduce_from", lambda x, axis: x)],
        Combination.of(world="2", tp="2", block="wide norms"),
    ),
    "gradient of the sum of squares from a rank's own heads": (
        [(norm, "copy_to", lambda x, axis: x)],
        Combination.of(world="2", tp="2", block="wide norms"),
    ),
    "gradient of a bias before an activation from a part of the rows": (
        [(activations, "_biased_backward", _bias_gradient_of_some_rows)],
        Combination.of(world="2", tp="2", regions="fused"),
    ),
}
