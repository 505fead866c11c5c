"""Mutants of layers that add to their normalized inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.extensions.normed_residual import layer
from tests.parity.mutants.common import mutant


@mutant(layer.NormedResidualLayer, "_added", world="2", pp="2", block="normed residual")
def _unweighted(self: layer.NormedResidualLayer, x: Tensor, *rest: Any) -> Tensor:
    """Normalized inputs without their weight on some stages."""
    self.residual_weight = 1.0 if torch.distributed.get_rank() else self.residual_weight
    return _true_added(self, x, *rest)


_true_added = layer.NormedResidualLayer._added
