"""Policy for NaN/Inf and spiking steps: skip, report or end the run.

The device alone decides whether a step updates the weights, so the host does not wait for it. The verdict is read when
the gradients of the next step are being computed, before they are used: the weights are then still those from before
the bad step, and it can be run again. Every rank reads the same verdict and takes the same decisions.
"""

from __future__ import annotations

from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.training.config.run_config import ChecksConfig
from megatron.training.hooks import Judge, Verdict
from megatron.training.progress import Progress, Step


class StepGuard:
    """Judges every step, and counts skipped ones and the samples of the others in the run's progress."""

    def __init__(self, checks: ChecksConfig, progress: Progress, judge: Judge | None) -> None:
        self.checks = checks
        self._progress = progress
        self.judge = judge
        """Called by the optimizer before it updates the weights; None if spikes are not checked for."""

        self._pending: tuple[Step, StepResult] | None = None

    def watch(self, step: Step, result: StepResult) -> None:
        """Remembers a step that was just launched, for `verdict`."""
        assert self._pending is None, f"the verdict on {self._pending} has not been read"
        self._pending = step, result

    def verdict(self) -> Verdict | None:
        """The verdict on the last step, once; None if there is none to read. Waits for the device."""
        if self._pending is None:
            return None
        (step, result), self._pending = self._pending, None
        progress = self._progress
        checks = self.checks
        nan = is_nan(result)
        refused = (nan and checks.check_for_nan_in_loss_and_grad) or (result.spike and result.skipped)
        ends = refused and progress.nan_iterations + progress.skipped_spikes >= checks.max_skipped_iterations
        if not ends:
            progress.skipped_iterations += result.skipped
            progress.scheduled_samples += 0 if result.skipped else step.samples
            progress.nan_iterations += nan
            progress.skipped_spikes += result.spike and result.skipped
        return Verdict(step, result, nan, refused, ends)

    def store_means(self) -> None:
        """Copies the running means into the progress, to be saved. Waits for the device."""
        if self.judge is not None:
            self._progress.running_means = tuple(self.judge.state.tolist())


def is_nan(result: StepResult) -> bool:
    """Return whether loss or gradient were not finite, and a lower loss scale would not help."""
    return not result.finite and not result.scale_overflow
