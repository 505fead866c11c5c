"""Policy for NaN/Inf and spiking steps: skip, report or end the run.

The device alone decides whether a step updates the weights, so the host does not wait for it. The verdict is read when
the gradients of the next step are being computed, before they are used: the weights are then still those from before
the bad step, and it can be run again. Every rank reads the same verdict and takes the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.optimizer.distrib_optimizer import Judge, StepResult
from megatron.training.config.run_config import ChecksConfig
from megatron.training.progress import Progress, Step

WINDOW = 100
"""Steps in the running means of loss and gradient norm."""

WARM_UP = 10
"""Steps in a mean before steps are compared with it."""


class StepJudge:
    """Detects spikes: compares loss and gradient norm with their running means, on the device."""

    def __init__(self, checks: ChecksConfig, device: torch.device, means: tuple[float, ...]) -> None:
        self.skips = checks.max_skipped_iterations > 0
        self.enabled = checks.check_for_spiky_loss or checks.check_for_large_grads
        factors = [
            checks.spiky_loss_factor if checks.check_for_spiky_loss else torch.inf,
            checks.large_grads_factor if checks.check_for_large_grads else torch.inf,
        ]
        self.factors = torch.tensor(factors, dtype=torch.float64, device=device)
        self.state = torch.tensor(means or (0.0, 0.0, 0.0), dtype=torch.float64, device=device)
        """Mean loss, mean gradient norm, and the number of steps in them."""

    def __call__(self, norm: Tensor, overflow: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """(whether to skip the step, whether it is a spike), each 1 or 0. A skipped step enters no mean."""
        values = torch.stack([sums[0] / sums[1].clamp(min=1.0), norm])
        means, count = self.state[:2], self.state[2]
        above = (values > self.factors * means).any() & (count >= WARM_UP)
        spike = above.to(torch.float64) * (1.0 - overflow)
        skip = spike if self.skips else torch.zeros_like(spike)
        moved = torch.cat([means + (values - means) / (count + 1.0).clamp(max=WINDOW), count[None] + 1.0])
        self.state = torch.where(torch.maximum(skip, overflow) > 0, self.state, moved)
        return skip, spike


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

    def __init__(self, checks: ChecksConfig, device: torch.device, progress: Progress) -> None:
        self.checks = checks
        self._progress = progress
        self._judge = StepJudge(checks, device, progress.running_means)
        self._pending: tuple[Step, StepResult] | None = None

    @property
    def judge(self) -> Judge | None:
        """Called by the optimizer before it updates the weights; None if spikes are not checked for."""
        return self._judge if self._judge.enabled else None

    def watch(self, step: Step, result: StepResult) -> None:
        """Remembers a step that was just launched, for `verdict`."""
        assert self._pending is None, f"the verdict on {self._pending} has not been read"
        self._pending = step, result

    def verdict(self) -> Verdict | None:
        """The verdict on the last step, once; None if there is none to read. Waits for the device."""
        if self._pending is None:
            return None
        (step, result), self._pending = self._pending, None
        progress, checks, nan = self._progress, self.checks, is_nan(result)
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
        if self._judge.enabled:
            self._progress.running_means = tuple(self._judge.state.tolist())


def is_nan(result: StepResult) -> bool:
    """Whether loss or gradient were not finite, and a lower loss scale would not help."""
    return not result.finite and not result.scale_overflow
