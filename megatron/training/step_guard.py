"""Policy for NaN/Inf and spiking steps: skip, report or end the run.

The device alone decides whether a step updates the weights, so the host does not wait for the device. The host reads
the device's decision while the device computes the gradients of the next step, and before these gradients are used. A
bad step has not changed the weights, so the step can be repeated. All ranks read the same decision, so they act alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, StepResult
from megatron.training.config.run_config import ChecksConfig
from megatron.training.hooks import Callback, Judge, StepFinding, Verdict
from megatron.training.progress import Progress, Step

ADVICE_NAN = (
    "to continue without the step, add --iterations-to-skip {iteration}; to skip such steps automatically, "
    "--max-skipped-iterations; if the loss or the gradient norm had grown before, lower --lr or lengthen the warm-up, "
    "and resume from an earlier checkpoint"
)
ADVICE_SPIKE = "check the data and the learning rate; a larger --max-skipped-iterations continues from the checkpoint"


class BadStepError(Exception):
    """Raised if a bad step ends the run. `advice` tells the user how to continue the run."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


class StepGuard:
    """Policy that judges every step and ends the run after too many bad steps. The policy adds skipped steps, and the
    samples of all other steps, to the counters in the run's progress. `say` prints a line on one rank."""

    def __init__(
        self,
        checks: ChecksConfig,
        progress: Progress,
        optimizer: DistributedOptimizer,
        callbacks: Sequence[Callback],
        judge: Judge | None,
        say: Callable[[str], None],
    ) -> None:
        self.checks, self.judge = checks, judge
        """`judge` is the detector of spikes, which the optimizer calls before each weight update, or None if the run
        does not check for spikes."""

        self._progress, self._optimizer = progress, optimizer
        self._callbacks, self._say = callbacks, say
        self._pending: tuple[Step, StepResult] | None = None

    def watch(self, step: Step, result: StepResult) -> None:
        """Store a step that has just been launched. `settle` later reads the verdict on the step."""
        assert self._pending is None, f"the verdict on {self._pending} has not been read"
        self._pending = step, result

    def settle(self) -> bool:
        """Read the verdict on the last step, and act on the verdict. Call this method once per step. The call waits for
        the device. The call is collective if the loss or gradient was not finite. Return True if a callback's search
        for the cause may have overwritten the gradient buffers. Raises BadStepError, on every rank, if the step ends
        the run.
        """
        self._optimizer.end_update()
        if self._pending is None:
            return False
        (step, result), self._pending = self._pending, None
        verdict = self._verdict(step, result)
        for callback in self._callbacks:
            callback.on_verdict(verdict)
        if verdict.ends_run:
            self._end_run(verdict)
        self._count(verdict)
        if result.spike:
            self._say(f" {verdict}{': skipped' if result.skipped else ''}")
        if not (verdict.nan and verdict.refused):
            return False
        findings = self._findings(verdict)
        self._say("; ".join([f" {verdict}: skipped", *(finding.text for finding in findings)]))
        return bool(findings)

    def _verdict(self, step: Step, result: StepResult) -> Verdict:
        nan = is_nan(result)
        refused = (nan and self.checks.check_for_nan_in_loss_and_grad) or (result.spike and result.skipped)
        skipped_before = self._progress.nan_iterations + self._progress.skipped_spikes
        return Verdict(step, result, nan, refused, refused and skipped_before >= self.checks.max_skipped_iterations)

    def _count(self, verdict: Verdict) -> None:
        """Update the counters in `Progress` for a step that does not end the run."""
        progress, result = self._progress, verdict.result
        progress.skipped_iterations += result.skipped
        progress.scheduled_samples += 0 if result.skipped else verdict.step.samples
        progress.nan_iterations += verdict.nan
        progress.skipped_spikes += result.spike and result.skipped

    def _findings(self, verdict: Verdict) -> list[StepFinding]:
        """Return the callbacks' findings about a step with a non-finite loss or gradient."""
        findings = [callback.search(verdict) for callback in self._callbacks]
        return [finding for finding in findings if finding is not None]

    def _end_run(self, verdict: Verdict) -> NoReturn:
        """Raise the error that ends the run, after a search for the origin of a NaN."""
        limit = self.checks.max_skipped_iterations
        allowed = f"{limit} iterations have already been skipped, the maximum of --max-skipped-iterations; "
        message = f"{allowed if limit else ''}{verdict}"
        if not verdict.nan:
            raise BadStepError(message, ADVICE_SPIKE)
        findings = self._findings(verdict)
        message = "; ".join([message, *(finding.text for finding in findings)])
        own_advice = ADVICE_NAN.format(iteration=verdict.step.iteration)
        advice = [*(finding.advice for finding in findings if finding.advice), own_advice]
        raise BadStepError(message, "; ".join(advice))

    def store_means(self) -> None:
        """Copy the running means of loss and gradient norm into `Progress`, which checkpoints contain. This method
        waits for the device."""
        if self.judge is not None:
            self._progress.running_means = tuple(self.judge.state.tolist())


def is_nan(result: StepResult) -> bool:
    """Return True if the loss or gradient was NaN or infinite for any reason other than a loss scale that is too
    large."""
    return not result.finite and not result.scale_overflow
