"""Mutants of updates ahead of the gradient norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.optimizer import distrib_optimizer
from megatron.core.pipeline_parallel import executor
from megatron.extensions.post_validation import post_validation
from tests.parity.mutants.common import mutant

_LATER = {"world": "2", "pp": "2", "schedule": "zb-h2", "norm": "validated later"}


@mutant(post_validation.RollbackCopies, "restore", **_LATER)
def _without_moments(self: Any) -> None:
    """Moments not rolled back.

    Rolls main parameters and gradients back."""
    pairs = list(zip(self.tensors, self.copies, strict=True))
    for tensor, copy in [*pairs[::4], *pairs[3::4], *self._further]:
        tensor.copy_(copy)


@mutant(post_validation.RollbackCopies, "restore", **_LATER)
def _without_gradients(self: Any) -> None:
    """Gradients not rolled back.

    Rolls main parameters and moments back; gradients are those that the next step has zeroed."""
    for i, (tensor, copy) in enumerate(zip(self.tensors, self.copies, strict=True)):
        if i % 4 < 3:
            tensor.copy_(copy)


@mutant(executor.PipelineExecutor, "_validate", **_LATER)
def _keeps_forwards(self: Any, action: Any) -> None:
    """Forward passes before a roll-back not run again.

    The forward passes of parameters that were rolled back stand."""
    self.validate()


@mutant(distrib_optimizer.DistributedOptimizer, "apply", **_LATER)
def _unclipped(self: Any, update: Any, skip: Tensor, coefficient: Any) -> None:
    """Step not clipped after a roll-back.

    A step that is made again is not clipped either."""
    _true_update(self, update, skip, None)


_true_update = distrib_optimizer.DistributedOptimizer.apply
