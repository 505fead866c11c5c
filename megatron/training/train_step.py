"""One optimizer step on one global batch, and the reaction to one that is NaN, Inf or a spike."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from megatron.core.batch import Batch
from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.core.optimizer.distrib_optimizer import StepResult, Update
from megatron.core.optimizer.optimizer import Rates
from megatron.core.parts import STEP_SEARCHES
from megatron.core.pipeline_parallel.executor import StaleForwards
from megatron.training.forward_backward import StepInput, Sums
from megatron.training.hooks import StepFinding, StepView
from megatron.training.progress import GRAD_SYNC, Step
from megatron.training.run import TrainingRun
from megatron.training.step_guard import Verdict


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
    read = before_update is not None or _is_read(run, step)
    given = _input_of(run, step)
    run.begun = None if read or run.pipeline.of_step is None else _following(run, step)
    sums = _gradients(run, given)
    if settle(run):
        sums = _gradients(run, _prepared(run, step, given.batches))
    with run.timers(GRAD_SYNC):
        factor = reduce_model_grads(run.ddp, sums.total_tokens, run.runtime.state, sums.seed)
    if before_update is not None:
        run.ddp.scale_grads_(factor)
        factor = torch.ones_like(factor)
        before_update()
    for meter in run.meters:
        meter.gradients_ready(factor)
    with run.timers("optimizer"):
        result = _optimizer_step(run, sums, factor, read)
    run.guard.watch(step, result)
    view = StepView(run, given.batches, sums.loss_and_tokens)
    for meter in run.meters:
        meter.after_update(view, result)
    run.interval.results.append(result)
    run.interval.losses.append(sums.loss_and_tokens)
    run.interval.batch_size = step.samples
    run.interval.samples += step.samples


def _input_of(run: TrainingRun, step: Step) -> StepInput:
    """Inputs of a step: at hand if passes of it have begun in the step before."""
    if run.begun is not None and run.begun.step == step:
        return run.begun
    with run.timers("data"):
        batches = run.data.read_batches(step, watched=True)
    return _prepared(run, step, batches)


def _prepared(run: TrainingRun, step: Step, batches: list[Batch]) -> StepInput:
    return run.forward_backward.prepared(step, batches, run.optimizer.loss_scale)


def _following(run: TrainingRun, step: Step) -> StepInput | None:
    """Inputs of the next step; None if there is none with the same model, or meters look at it as a whole."""
    number, sample = step.iteration + 1, step.first_sample + step.samples
    if number in (run.config.checks.iterations_to_skip or ()) or run.plan.at(sample) is not run.plan.at(
        step.first_sample
    ):
        return None
    if any(meter.reads_result(number) for meter in run.meters):
        return None
    return _input_of(run, Step(number, sample, run.batch_sizes.at(sample)))


def _gradients(run: TrainingRun, given: StepInput) -> Sums:
    """The gradients of a step; if the update before it is rolled back on the way, those of the parameters that are then
    there."""
    for meter in run.meters:
        meter.begin_step(given.step)
    try:
        return run.forward_backward.gradients(given, run.begun)
    except StaleForwards:
        return _gradients(run, _prepared(run, given.step, given.batches))


def _optimizer_step(run: TrainingRun, sums: Sums, factor: torch.Tensor, read: bool) -> StepResult:
    samples, interval = run.progress.scheduled_samples, run.interval  # settled: the step before counts or not
    interval.learning_rate = run.scheduler.lr_at(samples)
    interval.decoupled_lr = run.scheduler.decoupled_lr_at(samples)
    rates = Rates(interval.learning_rate, run.scheduler.weight_decay_at(samples), interval.decoupled_lr)
    passes = run.forward_backward
    return run.optimizer.step(
        Update(rates, factor, sums.loss_and_tokens, run.guard.judge, passes.end_step, passes.step_state, read)
    )


def _is_read(run: TrainingRun, step: Step) -> bool:
    """Whether parameters or the result of a step are read before the next one begins."""
    iteration, is_last = step.iteration, step.iteration == run.train_iters
    by_task = any(task.reads_result and task.at(iteration, is_last) for task in run.tasks)
    return is_last or by_task or any(meter.reads_result(iteration) for meter in run.meters)


ADVICE_NAN = (
    "to continue without the step, add --iterations-to-skip {iteration}; to skip such steps automatically, "
    "--max-skipped-iterations"
)
ADVICE_SPIKE = "look at the data and the learning rate; a larger --max-skipped-iterations continues from the checkpoint"


class BadStepError(Exception):
    """A step that ends the run. `advice` is for the user."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


def settle(run: TrainingRun) -> bool:
    """Reads the verdict on the last step and acts on it. Collective if the step was not finite.

    Returns whether a search may have overwritten the gradient buffers. Raises BadStepError, on every rank, if the step
    ends the run.
    """
    run.optimizer.validate()
    verdict = run.guard.verdict()
    if verdict is None:
        return False
    if verdict.ends_run:
        _end(run, verdict)
    if verdict.result.spike:
        run.runtime.say(f" {verdict}{': skipped' if verdict.result.skipped else ''}")
    if not (verdict.nan and verdict.refused):
        return False
    findings = _search(run, verdict)
    run.runtime.say("; ".join([f" {verdict}: skipped", *(finding.text for finding in findings)]))
    return bool(findings)


def _search(run: TrainingRun, verdict: Verdict) -> list[StepFinding]:
    """Findings of extensions about a step that was not finite."""
    findings = [STEP_SEARCHES[name](run, verdict) for name in STEP_SEARCHES]
    return [finding for finding in findings if finding is not None]


def _end(run: TrainingRun, verdict: Verdict) -> NoReturn:
    """Raises the error that ends the run, after a search for the origin of a NaN."""
    limit = run.config.checks.max_skipped_iterations
    skipped = f"{limit} iterations were skipped before, as many as --max-skipped-iterations allows; " if limit else ""
    message = f"{skipped}{verdict}"
    if not verdict.nan:
        raise BadStepError(message, ADVICE_SPIKE)
    findings, advice = _search(run, verdict), ADVICE_NAN.format(iteration=verdict.step.iteration)
    message = "; ".join([message, *(finding.text for finding in findings)])
    raise BadStepError(message, "; ".join([*(finding.advice for finding in findings if finding.advice), advice]))
