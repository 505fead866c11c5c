"""Optimizer post-validation: an update is made before the gradient norm of the whole model is known, and checked later.

Qi et al., arXiv 2401.10241, section 4. A step that waits for the norm waits for the last backward of the slowest
pipeline stage. With post-validation each stage starts the reduction of the norm, updates with what it knows (nothing is
clipped; nothing is updated where its own gradients are not finite), and runs the first forward passes of the next step.
At VALIDATE, before its first backward, the reduction has ended. If the step had to be clipped or skipped on any rank,
all ranks roll back, repeat the update with the true factor, and repeat those forward passes.

The paper rolls back by arithmetic in place, which rounds. Here states are copied before the update, so that a rolled
back step has the bits of one that has waited; that takes the memory of a second set of this rank's shards. The paper
also passes the partial norm from stage to stage. As one wrong guess on any rank makes all ranks run their forward
passes again, that saves nothing, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import Pending
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, StepResult, Update
from megatron.core.optimizer.optimizer import OptimizerShard
from megatron.core.torch_private import foreach_copy_


class RollbackCopies:
    """A second set of `tensors`, allocated once, so that memory is final before the first step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.copies = [torch.empty_like(tensor) for tensor in tensors]
        self._further: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def take(self, further: Sequence[Tensor] = ()) -> None:
        """Copies the current values, and those of small `further` tensors."""
        if self.tensors:
            foreach_copy_(self.copies, self.tensors)
        self._further = [(tensor, tensor.detach().clone()) for tensor in further]

    @torch.no_grad()
    def restore(self) -> None:
        """Writes the values of the last `take` back."""
        if self.tensors:
            foreach_copy_(self.tensors, self.copies)
        for tensor, copy in self._further:
            tensor.copy_(copy)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)


class _Unvalidated(NamedTuple):
    """An update that was made ahead of its verdict, and the state before it that is no tensor."""

    update: Update
    result: StepResult
    norm: Pending
    updates: Tensor
    scaler: dict[str, float]


class PostValidation:
    """Makes the updates of an optimizer ahead of the norm: see `megatron.core.optimizer.distrib_optimizer.UpdateAhead`.

    Main parameters, states, and gradients, which an update scales in place, are copied.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.optimizer = optimizer
        owned = (shard for shard in optimizer.shards if isinstance(shard, OptimizerShard))
        changed = ((shard.main.detach(), *shard.states.values(), shard.device_grads) for shard in owned)
        of_chain = [tensor for chain in optimizer.chains for tensor in chain.tensors]
        self.copies = RollbackCopies([*(tensor for tensors in changed for tensor in tensors), *of_chain])
        self._unvalidated: _Unvalidated | None = None
        self._last: StepResult | None = None
        """Of the step before."""

    @property
    def nbytes(self) -> int:
        return self.copies.nbytes

    def begin(self, update: Update, own: Tensor, result: StepResult) -> bool:
        assert self._unvalidated is None, "the step before is not validated"
        ahead = not update.read and self.likely_to_stand()
        self._last = result
        if ahead:
            optimizer, skip = self.optimizer, (~torch.isfinite(own).all()).to(torch.float64)
            self.copies.take(update.step_state())
            before = optimizer.updates.clone(), optimizer.scaler.state_dict()
            self._unvalidated = _Unvalidated(update, result, optimizer.grad_norm.start(own), *before)
            optimizer.apply(update, skip, None)
            optimizer.scaler.update(False)
        return ahead

    def likely_to_stand(self) -> bool:
        """Whether the step before was neither clipped nor skipped. If it was, so may be this one, and waiting for the
        norm costs less than rolling back."""
        last, largest = self._last, self.optimizer.config.clip_grad
        return last is None or not (last.skipped or (largest > 0 and last.grad_norm > largest))

    @torch.no_grad()
    def validate(self) -> bool:
        if self._unvalidated is None:
            return False
        (update, result, norm, updates, scaler), self._unvalidated = self._unvalidated, None
        optimizer = self.optimizer
        skip, coefficient = optimizer.verdict(update, norm.wait(), result)
        stands = skip == 0 if coefficient is None else (skip == 0) & (coefficient == 1)
        if bool(stands):
            return False
        optimizer.ddp.wait_param_sync()
        self.copies.restore()
        optimizer.step_count = int(updates.item())
        optimizer.scaler.load_state_dict(scaler)
        optimizer.apply(update, skip, coefficient)
        optimizer.scaler.update(not result.finite)
        return True
