"""Optimizer post-validation: updates are performed before the global gradient norm is known, and checked later (Qi et
al., arXiv 2401.10241, section 4). Without post-validation, a step waits for the norm, and therefore for the last
backward pass of the slowest pipeline stage. With post-validation, each stage starts the reduction of the norm, and
updates its parameters without waiting for the result. In this update, the stage does not clip its gradients, and it
skips the update only if its own gradients are not finite. After its update, the stage runs the first forward passes of
the next step. The norm is checked by the action VALIDATE, which precedes the first backward pass of the next step. If
the step should have been clipped or skipped on any rank, all ranks roll back, repeat the update with the correct
factor, and repeat the forward passes.

The paper rolls back an update by reversing its arithmetic in place, which causes rounding errors. In this program,
states are copied before the update. A step that is rolled back and repeated is therefore bit-equal to a step that
waited for the norm. The copies need as much memory as a second set of this rank's shards. In the paper, stages validate
an update one after another, because each stage sends the partially reduced norm to the next stage. In this program, all
ranks validate an update at the same time, because all ranks must repeat their forward passes if the update is rolled
back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.collectives import Pending
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, StepResult, Update
from megatron.core.optimizer.optimizer import OptimizerShard
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.actions import Action, Kind, Lists
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.torch_private import foreach_copy_
from megatron.training.forward_backward import Pipeline, StepInput, Sums
from megatron.training.progress import Step
from megatron.training.run import TrainingRun
from megatron.training.step_parts import StepParts
from megatron.training.train_step import TrainStep, is_read


class RollbackCopies:
    """Copies of `tensors`, from which a rollback restores these tensors. The memory of the copies is allocated once, so
    that memory use does not grow after the first step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.copies = [torch.empty_like(tensor) for tensor in tensors]
        self._further: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def take(self, further: Sequence[Tensor] = ()) -> None:
        """Copy the current values of `tensors`, and of the additional tensors in `further`. Each call allocates new
        memory for the copies of `further`, so these tensors should be small."""
        if self.tensors:
            foreach_copy_(self.copies, self.tensors)
        self._further = [(tensor, tensor.detach().clone()) for tensor in further]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values that the last call of `take` copied."""
        if self.tensors:
            foreach_copy_(self.tensors, self.copies)
        for tensor, copy in self._further:
            tensor.copy_(copy)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)


class _Unvalidated(NamedTuple):
    """Update that was performed before the global gradient norm was known. The fields `updates` and `scaler` contain
    the number of updates and the state of the loss scaler before the update, which a rollback restores."""

    update: Update
    result: StepResult
    norm: Pending
    updates: Tensor
    scaler: dict[str, float]


class PostValidatedOptimizer(DistributedOptimizer):
    """Optimizer that may perform an update before the gradient norm is known. If the result of a step is read before
    the next step, the optimizer waits for the norm.

    Before an early update, main parameters and optimizer states are copied, so that they can be restored. Gradients are
    also copied, because the update scales them in place.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        ddp: DistributedDataParallel,
        state: ParallelState,
        host_threads: int | None = None,
    ) -> None:
        super().__init__(config, ddp, state, host_threads)
        owned = (shard for shard in self.shards if isinstance(shard, OptimizerShard))
        changed = ((shard.main.detach(), *shard.states.values(), shard.device_grads) for shard in owned)
        of_chain = [tensor for chain in self.chains for tensor in chain.tensors]
        self.copies = RollbackCopies([*(tensor for tensors in changed for tensor in tensors), *of_chain])
        self.is_read = True
        """True if the result of the next call of `step` is read before the call after it, for example to log the
        loss."""
        self.step_state: Callable[[], Sequence[Tensor]] = tuple
        """Function that returns all tensors that `Update.on_update` changes."""
        self._unvalidated: _Unvalidated | None = None
        self._last: StepResult | None = None
        """Result of the previous step."""

    @property
    def nbytes(self) -> tuple[int, int]:
        device, host = super().nbytes
        return device + self.copies.nbytes, host

    def begin_update(self, update: Update, own: Tensor, result: StepResult) -> None:
        assert self._unvalidated is None, "the previous step has not been validated"
        ahead = not self.is_read and self.likely_to_stand()
        self._last = result
        if not ahead:
            super().begin_update(update, own, result)
            return
        skip = (~torch.isfinite(own).all()).to(torch.float64)
        self.copies.take(self.step_state())
        before = self.updates.clone(), self.scaler.state_dict()
        self._unvalidated = _Unvalidated(update, result, self.grad_norm.start(own), *before)
        self.apply(update, skip, None)
        self.scaler.update(False)

    def likely_to_stand(self) -> bool:
        """Return True if the previous step was neither clipped nor skipped. After a clipped or skipped step, the next
        step will probably be clipped or skipped too. The caller should then wait for the norm, because waiting costs
        less than rolling back an update."""
        last, largest = self._last, self.config.clip_grad
        return last is None or not (last.skipped or (largest > 0 and last.grad_norm > largest))

    def end_update(self) -> None:
        self.validate()

    @torch.no_grad()
    def validate(self) -> bool:
        """Check the last update, if it has not been checked yet, and wait for the result. Return True on all ranks if
        the update was rolled back and repeated. Afterwards, parameters, states and everything that `on_update` changes
        are bit-equal to the result of a step without post-validation. All ranks must call this method."""
        if self._unvalidated is None:
            return False
        (update, result, norm, updates, scaler), self._unvalidated = self._unvalidated, None
        skip, coefficient = self.verdict(update, norm.wait(), result)
        stands = skip == 0 if coefficient is None else (skip == 0) & (coefficient == 1)
        if bool(stands):
            return False
        self.ddp.wait_param_sync()
        self.copies.restore()
        self.step_count = int(updates.item())
        self.scaler.load_state_dict(scaler)
        self.apply(update, skip, coefficient)
        self.scaler.update(not result.finite)
        return True


class StaleForwards(Exception):
    """Raised if a rollback changed the parameters after the first forward passes of an action list. The caller must run
    the action list again from its first action. If one rank raises this exception, all ranks raise it, and no pipeline
    message is in flight."""


class ValidatingExecutor(PipelineExecutor[GPTModel, Batch]):
    """Executor of action lists that contain the action VALIDATE, which checks the previous update. If the update is
    rolled back, the executor raises `StaleForwards`."""

    validate: Callable[[], bool]
    """Function that checks the previous update. The function returns True on all ranks if the update was rolled back,
    so that the parameters have changed."""

    def handle(self, action: Action) -> None:
        if action.kind is not Kind.VALIDATE:
            super().handle(action)
        elif self.validate():
            # No pipeline message is in flight at this action, so the unfinished passes can be dropped.
            self.drop()
            raise StaleForwards


class ValidatingPipeline(Pipeline):
    """Pipeline whose action lists contain the action VALIDATE, which checks the previous update. No rank runs a
    backward pass before VALIDATE."""

    executor_type = ValidatingExecutor

    @property
    def counting_rank(self) -> int | None:
        # No rank can count the tokens of this step in advance, because the rank that computes the loss may still
        # process the previous step.
        return None

    def lists(self, microbatches: int, in_turns: bool = False) -> Lists:
        shape = self.schedule, self.pp.size, microbatches, self.layout.chunks
        return pipeline_lists(*shape, group=self.group, in_turns=in_turns, validates=True)


class PostValidatedStep(TrainStep):
    """Training step that can begin before the previous update is validated. If that update is rolled back, the step
    repeats its first forward passes."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        assert isinstance(run.optimizer, PostValidatedOptimizer)
        assert isinstance(run.pipeline.executor, ValidatingExecutor)
        self.optimizer, run.pipeline.executor.validate = run.optimizer, run.optimizer.validate
        self.optimizer.step_state = run.forward_backward.step_state

    def gradients(self, given: StepInput) -> Sums:
        try:
            return super().gradients(given)
        except StaleForwards:
            # Prepare the inputs again, because the rollback may have changed the loss scale.
            return self.gradients(self.prepared(given.step, given.batches))

    def update(self, step: Step, sums: Sums, factor: Tensor) -> StepResult:
        self.optimizer.is_read = is_read(self.run, step)
        return super().update(step, sums, factor)


PARTS = StepParts(step=PostValidatedStep, pipeline=ValidatingPipeline, optimizer=PostValidatedOptimizer)
