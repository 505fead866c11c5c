"""One optimizer step on one global batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.core.batch import Batch
from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.core.pipeline_parallel.executor import StaleForwards
from megatron.training.checks.bad_steps import settle
from megatron.training.forward_backward import Sums
from megatron.training.hooks import StepView
from megatron.training.progress import GRAD_SYNC, Step
from megatron.training.run import TrainingRun


def train_step(run: TrainingRun, before_update: Callable[[], None] | None = None) -> None:
    """Makes the next step. `before_update` is called when the gradients are final.

    Raises BadStepError, on every rank, if the step before ends the run."""
    progress, step = run.progress, run.progress.next_step(run.batch_sizes)
    if step.iteration in (run.config.checks.iterations_to_skip or ()):
        run.interval.passed_over += 1
        progress.skipped_iterations += 1
    else:
        _update(run, step, before_update)
    run.measured.clear()
    progress.iteration += 1
    progress.consumed_samples += step.samples
    progress.data_fingerprint = run.data.fingerprint_at(progress.consumed_samples)


def _update(run: TrainingRun, step: Step, before_update: Callable[[], None] | None) -> None:
    with run.timers("data"):
        batches = run.data.read_batches(step, log=True)
    sums = _gradients(run, step, batches)
    if settle(run):
        sums = _gradients(run, step, batches)
    with run.timers(GRAD_SYNC):
        factor = reduce_model_grads(run.ddp, sums.total_tokens, run.runtime.state, sums.seed)
    if before_update is not None:
        run.ddp.scale_grads_(factor)
        factor = torch.ones_like(factor)
        before_update()
    for meter in run.meters:
        meter.gradients_ready(factor)
    with run.timers("optimizer"):
        result = _optimizer_step(run, sums, factor, ahead=before_update is None and _may_go_ahead(run, step))
    run.guard.watch(step, result)
    view = StepView(run, batches, sums.loss_and_tokens)
    for meter in run.meters:
        meter.after_update(view, result)
    run.interval.results.append(result)
    run.interval.losses.append(sums.loss_and_tokens)
    run.interval.batch_size = step.samples
    run.interval.samples += step.samples


def _gradients(run: TrainingRun, step: Step, batches: list[Batch]) -> Sums:
    """The gradients of a step; if the update before it is rolled back on the way, those of the parameters that are then
    there."""
    for meter in run.meters:
        meter.begin_step(step)
    try:
        return run.forward_backward(step, batches, run.optimizer.loss_scale)
    except StaleForwards:
        return _gradients(run, step, batches)


def _optimizer_step(run: TrainingRun, sums: Sums, factor: torch.Tensor, ahead: bool) -> StepResult:
    samples, interval = run.progress.scheduled_samples, run.interval  # settled: the step before counts or not
    interval.learning_rate = run.scheduler.lr_at(samples)
    interval.decoupled_lr = run.scheduler.decoupled_lr_at(samples)
    return run.optimizer.step(
        interval.learning_rate,
        run.scheduler.weight_decay_at(samples),
        sums.loss_and_tokens,
        run.guard.judge,
        interval.decoupled_lr,
        factor,
        on_update=run.forward_backward.end_step,
        ahead=ahead,
        moved=run.forward_backward.step_state() if ahead else (),
    )


def _may_go_ahead(run: TrainingRun, step: Step) -> bool:
    """Whether --optimizer-post-validation lets the update go ahead of the norm: nobody reads its result before the next
    step, and it is likely to stand."""
    if not (run.config.optimizer.optimizer_post_validation and likely_to_stand(run)):
        return False
    iteration, is_last = step.iteration, step.iteration == run.train_iters
    read = any(task.reads_result and task.at(iteration, is_last) for task in run.tasks)
    return not (is_last or read or any(meter.reads_result(iteration) for meter in run.meters))


def likely_to_stand(run: TrainingRun) -> bool:
    """Whether the step before was neither clipped nor skipped. If it was, so may be this one, and waiting for the norm
    costs less than rolling back."""
    last, largest = run.guard.last, run.config.optimizer.clip_grad
    return last is None or not (last.skipped or (largest > 0 and last.grad_norm > largest))
