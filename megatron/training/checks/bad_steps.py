"""Reaction to a NaN/Inf or spiking step: report it, find its origin, save it for a replay, end the run."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import replace
from typing import NoReturn

from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.extensions.diagnosis.nonfinite_search import Finding, search
from megatron.extensions.diagnosis.step_dump import SavedStep, save_step
from megatron.training.checks.step_guard import Verdict
from megatron.training.run import TrainingRun

ADVICE_NAN = (
    "replay the step, in one process or at another layout, and look at the module and the samples; to continue without "
    "the step, add --iterations-to-skip {iteration}; to skip such steps automatically, --max-skipped-iterations"
)
ADVICE_SPIKE = "look at the data and the learning rate; a larger --max-skipped-iterations continues from the checkpoint"
NOT_REPRODUCED = (
    "run again, with the same weights and samples, everything is finite: the cause is in none of them. Suspect the "
    "hardware, or a kernel that races"
)


class BadStepError(Exception):
    """A step that ends the run. `advice` tells the user what to do."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


def settle(run: TrainingRun) -> bool:
    """Reads the verdict on the last step and acts on it. Collective if the step was not finite.

    Returns whether the search overwrote the gradient buffers. Raises BadStepError, on every rank, if the step ends
    the run.
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
    finding = _search(run, verdict)
    run.runtime.say(f" {verdict}: skipped; {finding.describe() if finding is not None else NOT_REPRODUCED}")
    return True


def _search(run: TrainingRun, verdict: Verdict) -> Finding | None:
    step, watchdog = verdict.step, run.runtime.watchdog
    phase = watchdog.status.phase
    watchdog.begin(f"{phase}, running iteration {step.iteration} again to find the first value that is not finite")
    finding = search(run.forward_backward, step, run.data.read_batches(step), verdict.result.loss_scale)
    watchdog.begin(phase)
    return finding


def _end(run: TrainingRun, verdict: Verdict) -> NoReturn:
    """Raises the error that ends the run, after a search for the origin of a NaN."""
    limit, step = run.config.checks.max_skipped_iterations, verdict.step
    skipped = f"{limit} iterations were skipped before, as many as --max-skipped-iterations allows; " if limit else ""
    message = f"{skipped}{verdict}"
    if not verdict.nan:
        raise BadStepError(message, ADVICE_SPIKE)
    finding = _search(run, verdict)
    message += f"; {finding.describe() if finding is not None else NOT_REPRODUCED}"
    if run.config.checkpoint.save is not None:
        run.saver.wait()
        before = replace(run.progress, iteration=step.iteration - 1, consumed_samples=step.first_sample)
        try:
            saved = SavedStep(step, verdict.result.loss_scale, finding)
            batches = run.data.train.next_step(step.first_sample, step.samples)
            folder = save_step(saved, batches, run.saver.checkpointer, before)
            message += f"\nthe step, and the state before it, are in {folder}: python tools/replay_step.py {folder}"
        except CheckpointError as error:
            print(f"{socket.gethostname()}: the step was not saved: {error}", file=sys.stderr, flush=True)
    if finding is not None and finding.rank != run.runtime.launch.rank:
        time.sleep(1.0)  # the rank with the first bad value reports
    raise BadStepError(message, ADVICE_NAN.format(iteration=step.iteration))
