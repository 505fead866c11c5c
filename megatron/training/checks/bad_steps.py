"""Reaction to a NaN/Inf or spiking step: report it, have extensions search for its origin, end the run."""

from __future__ import annotations

from typing import NoReturn

from megatron.core.parts import STEP_SEARCHES
from megatron.training.checks.step_guard import Verdict
from megatron.training.hooks import StepFinding
from megatron.training.run import TrainingRun

ADVICE_NAN = (
    "to continue without the step, add --iterations-to-skip {iteration}; to skip such steps automatically, "
    "--max-skipped-iterations"
)
ADVICE_SPIKE = "look at the data and the learning rate; a larger --max-skipped-iterations continues from the checkpoint"


class BadStepError(Exception):
    """A step that ends the run. `advice` tells the user what to do."""

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
    """What extensions find out about a step that was not finite."""
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
