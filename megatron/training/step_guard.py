"""Policy for NaN/Inf and spiking steps: skip, report or end the run.

The device alone decides whether a step updates the weights, so the host does not wait for it. The verdict is read when
the gradients of the next step are being computed, before they are used: the weights are then still those from before
the bad step, and it can be run again. Every rank reads the same verdict and takes the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.core.parts import STEP_JUDGES
from megatron.training.config.run_config import RunConfig
from megatron.training.progress import Progress, Step


@dataclass(frozen=True)
class Verdict:
    """The outcome of one step."""

    step: Step
    result: StepResult
    nan: bool
    """Whether loss or gradient were not finite, and a lower loss scale would not help."""

    refused: bool
    """Whether the step violates a check: it was skipped for it, or ends the run."""

    ends_run: bool
    """Whether --max-skipped-iterations are used up."""

    def __str__(self) -> str:
        total, tokens = self.result.sums
        values = f"loss {total / max(tokens, 1.0):.6g}, gradient norm {self.result.grad_norm:.6g}"
        how = "not finite" if self.nan else "far above the mean of the steps before"
        return f"iteration {self.step.iteration} is {how} ({values})"


class StepGuard:
    """Judges every step, and counts skipped ones and the samples of the others in the run's progress."""

    def __init__(self, config: RunConfig, device: torch.device, progress: Progress) -> None:
        self.checks = config.checks
        self._progress = progress
        named = STEP_JUDGES.chosen(config)
        self.judge: Any = None if named is None else STEP_JUDGES[named](config, device, progress.running_means)
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
    """Whether loss or gradient were not finite, and a lower loss scale would not help."""
    return not result.finite and not result.scale_overflow
