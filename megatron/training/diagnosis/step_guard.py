"""What becomes of steps whose loss or gradient is not finite, or far above those before.

The device decides alone whether a step updates anything, so that the host need not wait for it: the verdict is read
when the gradients of the next step are under way, before they are used. Weights are then still those from before the
step that failed; `nonfinite_search` runs it again, and `step_dump` keeps it for `tools/replay_step.py` if it ends the
run. Every rank reads the same verdict and takes the same decisions.
"""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.core.optimizer.optimizer import Judge, StepResult
from megatron.training.config.run_config import ChecksConfig
from megatron.training.diagnosis.nonfinite_search import Finding, search
from megatron.training.diagnosis.step_dump import save_step
from megatron.training.forward_backward import Step

if TYPE_CHECKING:
    from megatron.training.setup import TrainingRun

WINDOW = 100
"""Steps over which the means of loss and gradient norm run."""

WARM_UP = 10
"""Steps that make up a mean before anything is compared with it."""

ADVICE_NAN = (
    "replay the step, in one process or at another layout, and look at the module and the samples; to go on without "
    "the step, add --iterations-to-skip {iteration}; to skip such steps by themselves, --max-skipped-iterations"
)
ADVICE_SPIKE = "look at the data and the learning rate; a larger --max-skipped-iterations goes on from the checkpoint"


class BadStepError(Exception):
    """A step that ends the run. `advice` says what to do."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


class StepJudge:
    """Compares loss and gradient norm with their means over the steps before, on the device."""

    def __init__(self, checks: ChecksConfig, device: torch.device, means: tuple[float, ...]) -> None:
        self.skips = checks.max_skipped_iterations > 0
        self.enabled = checks.check_for_spiky_loss or checks.check_for_large_grads
        factors = [
            checks.spiky_loss_factor if checks.check_for_spiky_loss else torch.inf,
            checks.large_grads_factor if checks.check_for_large_grads else torch.inf,
        ]
        self.factors = torch.tensor(factors, dtype=torch.float64, device=device)
        self.state = torch.tensor(means or (0.0, 0.0, 0.0), dtype=torch.float64, device=device)
        """Mean loss, mean gradient norm, and the steps that they are made of."""

    def __call__(self, norm: Tensor, overflow: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """(whether to skip the step, whether it is a spike), each 1 or 0. What updates the weights enters the means."""
        values = torch.stack([sums[0] / sums[1].clamp(min=1.0), norm])
        means, count = self.state[:2], self.state[2]
        above = (values > self.factors * means).any() & (count >= WARM_UP)
        spike = above.to(torch.float64) * (1.0 - overflow)
        skip = spike if self.skips else torch.zeros_like(spike)
        moved = torch.cat([means + (values - means) / (count + 1.0).clamp(max=WINDOW), count[None] + 1.0])
        self.state = torch.where(torch.maximum(skip, overflow) > 0, self.state, moved)
        return skip, spike


@dataclass(frozen=True)
class Pending:
    """A step whose verdict has not been read."""

    step: Step
    result: StepResult


class StepGuard:
    """Counts what was skipped, and ends the run where that is too much."""

    def __init__(self, checks: ChecksConfig, device: torch.device, means: tuple[float, ...]) -> None:
        self.checks = checks
        self._judge = StepJudge(checks, device, means)
        self._pending: Pending | None = None

    @property
    def judge(self) -> Judge | None:
        """What the optimizer asks before it updates anything."""
        return self._judge if self._judge.enabled else None

    def watch(self, step: Step, result: StepResult) -> None:
        """A step is on its way; `settle` will say what came of it."""
        assert self._pending is None, f"the verdict on {self._pending} has not been read"
        self._pending = Pending(step, result)

    def store(self, run: TrainingRun) -> None:
        """Settles, and puts what checkpoints keep into the run's progress."""
        self.settle(run)
        if self._judge.enabled:
            run.progress.running_means = tuple(self._judge.state.tolist())

    def settle(self, run: TrainingRun) -> bool:
        """Reads the verdict on the last step. Collective where that was not finite; True if finding out why took the
        memory of gradients that were there. Raises BadStepError, on every rank, if the step ends the run."""
        if self._pending is None:
            return False
        pending, self._pending = self._pending, None
        result, progress = pending.result, run.progress
        skipped, nan, spike = result.skipped, is_nan(result), result.spike
        refused = (nan and self.checks.check_for_nan_in_loss_and_grad) or (spike and skipped)
        if refused and progress.nan_iterations + progress.skipped_spikes >= self.checks.max_skipped_iterations:
            self._end(run, pending, nan)
        progress.skipped_iterations += skipped
        progress.nan_iterations += nan
        progress.skipped_spikes += spike and skipped
        if spike:
            run.runtime.say(f" {_what(pending, nan)}{': skipped' if skipped else ''}")
        if not (nan and refused):
            return False
        finding = _look_into(run, pending)
        run.runtime.say(f" {_what(pending, nan)}: skipped; {_why(finding)}")
        return True

    def _end(self, run: TrainingRun, pending: Pending, nan: bool) -> None:
        limit = self.checks.max_skipped_iterations
        skipped = (
            f"{limit} iterations were skipped before, as many as --max-skipped-iterations allows; " if limit else ""
        )
        if not nan:
            raise BadStepError(f"{skipped}{_what(pending, nan)}", ADVICE_SPIKE)
        finding = _look_into(run, pending)
        folder = _save(run, pending, finding)
        message = f"{skipped}{_what(pending, nan)}; {_why(finding)}"
        if folder:
            message += f"\nthe step, and the state before it, are in {folder}: python tools/replay_step.py {folder}"
        if finding is not None and finding.rank != run.runtime.launch.rank:
            time.sleep(1.0)  # the rank that it happened on reports
        raise BadStepError(message, ADVICE_NAN.format(iteration=pending.step.iteration))


def is_nan(result: StepResult) -> bool:
    """Whether loss or gradient were not finite, and no lower loss scale would mend that."""
    return not result.finite and not result.scale_overflow


def _look_into(run: TrainingRun, pending: Pending) -> Finding | None:
    watch = run.runtime.watch
    phase = watch.phase
    watch.begin(f"{phase}, running iteration {pending.step.iteration} again to find what is not finite")
    finding = search(run, pending.step, pending.result.loss_scale)
    watch.begin(phase)
    return finding


def _what(pending: Pending, nan: bool) -> str:
    total, tokens = pending.result.sums
    values = f"loss {total / max(tokens, 1.0):.6g}, gradient norm {pending.result.grad_norm:.6g}"
    how = "not finite" if nan else "far above the mean of the steps before"
    return f"iteration {pending.step.iteration} is {how} ({values})"


def _why(finding: Finding | None) -> str:
    if finding is not None:
        return finding.describe()
    return (
        "run again, with the same weights and samples, everything is finite: the cause is in none of them. Suspect the "
        "hardware, or a kernel that races"
    )


def _save(run: TrainingRun, pending: Pending, finding: Finding | None) -> str | None:
    """The folder that the step was saved in; None if it was not."""
    if run.config.checkpoint.save is None:
        return None
    try:
        return str(save_step(run, pending.step, pending.result.loss_scale, finding))
    except CheckpointError as error:
        print(f"{socket.gethostname()}: the step was not saved: {error}", file=sys.stderr, flush=True)
        return None
