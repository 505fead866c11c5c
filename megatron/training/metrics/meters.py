"""Built-in meters for multi-token prediction losses, custom metrics, and memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.core.parallel_state import Axis, ParallelState
from megatron.training.hooks import Measure, Meter, StepView
from megatron.training.progress import Interval


class Tallies(Meter):
    """Meter that sums the losses and token counts of this rank's modules over the steps of a log interval.

    `tallies` are tensors of equal shape, to which the modules add their counts. All tensor-parallel ranks have equal
    tallies. Only the tensor-parallel rank on which `counts` is True reports its tallies.
    """

    def __init__(self, tallies: Sequence[Tensor], rows: int, counts: bool, device: torch.device) -> None:
        self.tallies, self.counts = list(tallies), counts
        self.totals = torch.zeros(rows, 2, dtype=torch.float64, device=device)
        """One row [loss sum, number of tokens] for each tally, summed since the last record."""

    def end_step(self, skip: Tensor) -> None:
        """Add the sums of this step to the totals. If `skip` is 1, the step was skipped, and its sums are dropped."""
        for tally in self.tallies if self.counts else ():
            self.totals += torch.where(skip > 0, 0.0, tally)
        self.discard_step()

    def step_state(self) -> list[Tensor]:
        return [*self.tallies, self.totals]

    def discard_step(self) -> None:
        for tally in self.tallies:
            tally.zero_()

    def take(self) -> Tensor:
        """Return the totals of this rank since the last call as a tensor [rows * 2], which contains [loss sum, number
        of tokens] for each row."""
        taken, self.totals = self.totals, torch.zeros_like(self.totals)
        return taken.flatten()


def means(summed: Tensor) -> list[float | None]:
    """Return the mean, sum / count, for each row [sum, count] of `summed`. `summed` is the result of `take`, summed
    over all ranks. The mean is None for a row whose count is 0."""
    return [total / count if count else None for total, count in summed.view(-1, 2).tolist()]


class MultiTokenLosses(Tallies):
    """Meter that sums the losses of this rank's multi-token prediction modules, for the current step and since the last
    record."""

    def __init__(
        self, config: TransformerConfig, state: ParallelState, stages: Mapping[int, GPTModel], device: torch.device
    ) -> None:
        self.modules = [model.mtp for model in stages.values() if model.mtp is not None]
        super().__init__([module.tally for module in self.modules], config.mtp_depths, state.tp.first, device)

    def weighted_sum(self) -> Tensor:
        """Return the weighted sum of the multi-token prediction losses in the step so far. The loss that is
        differentiated includes this sum, but the reported loss does not. The sum is a float64 scalar. It is 0 on
        tensor-parallel ranks other than the first, so that each token is counted once."""
        parts = [module.weight * module.tally[:, 0].sum() for module in self.modules if self.counts]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self.totals.device)

    def report(self, summed: Tensor, interval: Interval) -> dict[str, float | None]:
        """Return the mean loss of each prediction depth, starting at depth 1, or None if no tokens were counted."""
        return {f"mtp_loss_{depth}": mean for depth, mean in enumerate(means(summed), 1)}


class UserMetrics(Tallies):
    """Meter that sums the values of custom metrics. If no custom metrics are registered, the meter does no work."""

    def __init__(self, metrics: Mapping[str, Measure], device: torch.device) -> None:
        super().__init__([], len(metrics), True, device)
        self.metrics, self.device = metrics, device

    def reads_result(self, iteration: int) -> bool:
        return bool(self.metrics)

    def after_update(self, step: StepView, result: StepResult) -> None:
        """Add the values of a step, unless the step was skipped."""
        if not self.metrics:
            return
        with torch.no_grad():
            rows = [self._row(name, measure(step)) for name, measure in self.metrics.items()]
            self.totals += torch.where(result.skip > 0, 0.0, torch.stack(rows))

    def _row(self, name: str, measured: tuple[Tensor | float, Tensor | float]) -> Tensor:
        """Convert a metric's result to a tensor [sum, count]. Raises ValueError unless `measured` consists of two
        numbers."""
        try:
            total, count = (torch.as_tensor(x, dtype=torch.float64, device=self.device).view(()) for x in measured)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"metric {name} must return a pair (sum, count) of numbers or one-element tensors, not {measured!r}"
            ) from None
        return torch.stack([total, count])

    def report(self, summed: Tensor, interval: Interval) -> dict[str, float | None]:
        """Return a dict from the name of each metric to its mean. The mean is None if the metric's count is zero."""
        return dict(zip(self.metrics, means(summed), strict=True))


class PeakMemory(Meter):
    """Meter of the peak memory so far, as the maximum over all ranks."""

    def __init__(self, world: Axis, device: torch.device) -> None:
        self.world, self.device = world, device

    def take(self) -> Tensor:
        """Return a tensor [ranks] that is zero except for the peak memory of this rank, at the rank's index. The sum
        over ranks then contains the peak memory of every rank."""
        row = torch.zeros(self.world.size, dtype=torch.float64, device=self.device)
        row[self.world.rank] = peak_memory_bytes(self.device)
        return row

    def report(self, summed: Tensor, interval: Interval) -> dict[str, object]:
        return {"peak_memory_bytes": int(summed.max())}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far, in bytes. On GPUs, this is the memory of the CUDA allocator; on the CPU, the
    memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
