"""One optimizer step on one global batch."""

from __future__ import annotations

import torch

from megatron.core.batch import Batch
from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.core.optimizer.distrib_optimizer import StepResult, Update
from megatron.core.optimizer.optimizer import Rates
from megatron.training.forward_backward import StepInput, Sums
from megatron.training.hooks import StepView
from megatron.training.progress import GRAD_SYNC, Step
from megatron.training.run import TrainingRun


def train_step(run: TrainingRun) -> None:
    """Perform the next step. Raises BadStepError, on every rank, if the previous step ends the run."""
    progress, step = run.progress, run.progress.next_step(run.batch_sizes)
    if step.iteration in run.passed_over:
        run.interval.passed_over += 1
        progress.skipped_iterations += 1
    else:
        run.step(step)
    run.measured.clear()
    progress.iteration += 1
    progress.consumed_samples += step.samples
    progress.data_fingerprint = run.data.fingerprint_at(progress.consumed_samples)


class TrainStep:
    """One optimizer step on one global batch: forward and backward passes, gradient reduction, and the update.

    Extensions may override parts of the step in a subclass (`megatron.training.step_parts`)."""

    sums: Sums
    """Loss sum and number of tokens of the current step, which meters use to correct the gradient before the update."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run

    def __call__(self, step: Step) -> None:
        run, given = self.run, self.inputs(step)
        sums = self.sums = self.gradients(given)
        if run.guard.settle():
            sums = self.sums = self.gradients(self.prepared(step, given.batches))
        with run.timers(GRAD_SYNC):
            factor = reduce_model_grads(run.ddp, sums.total_tokens, run.runtime.state, sums.seed)
        for meter in run.meters:
            meter.gradients_ready(factor)
        with run.timers("optimizer"):
            result = self.update(step, sums, factor)
        run.guard.watch(step, result)
        view = StepView(run, given.batches, sums.loss_and_tokens)
        for meter in run.meters:
            meter.after_update(view, result)
        run.interval.add(step, sums.loss_and_tokens, result)

    def inputs(self, step: Step) -> StepInput:
        """Read the micro-batches of a step."""
        with self.run.timers("data"):
            batches = self.run.data.read_batches(step, watched=True)
        return self.prepared(step, batches)

    def prepared(self, step: Step, batches: list[Batch]) -> StepInput:
        """Prepare a step's micro-batches for the forward and backward passes."""
        return self.run.forward_backward.prepared(step, batches, self.run.optimizer.loss_scale)

    def gradients(self, given: StepInput) -> Sums:
        """Run the forward and backward passes. The gradient buffers then contain the gradients of this rank's
        micro-batches."""
        for meter in self.run.meters:
            meter.begin_step(given.step)
        return self.run.forward_backward.gradients(given)

    def update(self, step: Step, sums: Sums, factor: torch.Tensor) -> StepResult:
        """Multiply the gradients by `factor`, and update the weights with them. The learning rates depend on the number
        of samples in earlier steps that updated the weights. `StepGuard.settle` must have been called for the previous
        step."""
        run, samples = self.run, self.run.progress.scheduled_samples
        rates = Rates(
            run.scheduler.lr_at(samples), run.scheduler.weight_decay_at(samples), run.scheduler.decoupled_lr_at(samples)
        )
        run.interval.learning_rate, run.interval.decoupled_lr = rates.lr, rates.decoupled_lr
        return run.optimizer.step(
            Update(rates, factor, sums.loss_and_tokens, run.guard.judge, run.forward_backward.end_step)
        )

    def finish(self) -> None:
        """Finish the work in progress when no further step follows."""
        self.run.guard.settle()
        self.run.optimizer.finish_param_sync()  # waits for the all-gather; ranks must not exit during a collective


def is_read(run: TrainingRun, step: Step) -> bool:
    """Return True if a task or meter reads the parameters or the step's result before the next step begins. If this
    function returns False, the step may delay the weight update."""
    iteration, is_last = step.iteration, step.iteration == run.train_iters
    by_task = any(task.reads_result and task.at(iteration, is_last) for task in run.tasks)
    return is_last or by_task or any(meter.reads_result(iteration) for meter in run.meters)
