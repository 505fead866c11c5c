"""Mutants of updates ahead of the gradient norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.optimizer import distrib_optimizer
from megatron.core.pipeline_parallel import executor
from megatron.extensions.post_validation import post_validation
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants


def _without_moments(self: Any) -> None:
    """Rolls main parameters and gradients back."""
    pairs = list(zip(self.tensors, self.copies, strict=True))
    for tensor, copy in [*pairs[::4], *pairs[3::4], *self._further]:
        tensor.copy_(copy)


def _without_gradients(self: Any) -> None:
    """Rolls main parameters and moments back; gradients are those that the next step has zeroed."""
    for i, (tensor, copy) in enumerate(zip(self.tensors, self.copies, strict=True)):
        if i % 4 < 3:
            tensor.copy_(copy)


def _keeps_forwards(self: Any, action: Any) -> None:
    """The forward passes of parameters that were rolled back stand."""
    self.validate()


def _unclipped(self: Any, update: Any, skip: Tensor, coefficient: Any) -> None:
    """A step that is made again is not clipped either."""
    _true_update(self, update, skip, None)


_true_update = distrib_optimizer.DistributedOptimizer.apply
_LATER = Combination.of(world="2", pp="2", schedule="zb-h2", norm="validated later")


MUTANTS: Mutants = {
    "moments not rolled back": ([(post_validation.RollbackCopies, "restore", _without_moments)], _LATER),
    "gradients not rolled back": ([(post_validation.RollbackCopies, "restore", _without_gradients)], _LATER),
    "forward passes before a roll-back not run again": (
        [(executor.PipelineExecutor, "_validate", _keeps_forwards)],
        _LATER,
    ),
    "step not clipped after a roll-back": ([(distrib_optimizer.DistributedOptimizer, "apply", _unclipped)], _LATER),
}
