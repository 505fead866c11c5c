"""Optimizer post-validation: an update is made before the gradient norm of the whole model is known, and checked later.

Qi et al., arXiv 2401.10241, section 4. A step that waits for the norm waits for the last backward of the slowest
pipeline stage. With post-validation each stage starts the reduction of the norm, updates with what it knows (nothing is
clipped; nothing is updated where its own gradients are not finite), and runs the first forward passes of the next step.
At VALIDATE, before its first backward, the reduction has ended. If the step had to be clipped or skipped on any rank,
all ranks roll back and make the update again with the true factor, and those forward passes are run again.

The paper rolls back by arithmetic in place, which rounds. Here states are copied before the update, so that a rolled
back step has the bits of one that has waited; that takes the memory of a second set of this rank's shards. The paper
also passes the partial norm from stage to stage. As one wrong guess on any rank makes all ranks run their forward
passes again, that saves nothing, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.collectives import Pending


class RollbackCopies:
    """A second set of `tensors`, allocated once, so that memory is final before the first step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.copies = [torch.empty_like(tensor) for tensor in tensors]
        self._further: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def take(self, further: Sequence[Tensor] = ()) -> None:
        """Copies the present values, and those of small `further` tensors."""
        if self.tensors:
            torch._foreach_copy_(self.copies, self.tensors)
        self._further = [(tensor, tensor.detach().clone()) for tensor in further]

    @torch.no_grad()
    def restore(self) -> None:
        """Writes the values of the last `take` back."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, self.copies)
        for tensor, copy in self._further:
            tensor.copy_(copy)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)


@dataclass(frozen=True)
class Update:
    """The arguments of an optimizer step that are the same when it is made again."""

    lr: float
    weight_decay: float
    decoupled_lr: float | None
    factor: Tensor | None
    judge: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None
    on_update: Callable[[Tensor], None] | None


@dataclass(frozen=True)
class UnvalidatedUpdate:
    """An update that was made ahead of its verdict, and the state before it that is no tensor."""

    update: Update
    norm: Pending
    """`GradNorm.start`."""

    updates: Tensor
    scaler: dict[str, float]
