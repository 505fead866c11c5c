"""Metrics of a user's own over a log interval."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.training.hooks import Meter, Metric, StepView
from megatron.training.progress import Interval


class UserMetrics(Meter):
    """Adds up what metrics measure. Costs nothing where there are none."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self.metrics, self.device = metrics, device
        self._totals = torch.zeros(len(metrics), 2, dtype=torch.float64, device=device)

    def reads_result(self, iteration: int) -> bool:
        return bool(self.metrics)

    def after_update(self, step: StepView, result: StepResult) -> None:
        """Adds a step, unless it was skipped."""
        if not self.metrics:
            return
        with torch.no_grad():
            rows = [self._row(name, metric.measure(step)) for name, metric in self.metrics.items()]
            self._totals += torch.where(result.skip > 0, 0.0, torch.stack(rows))

    def _row(self, name: str, measured: tuple[Tensor | float, Tensor | float]) -> Tensor:
        """[sum, count]. Raises ValueError for anything else than two numbers."""
        try:
            total, count = (torch.as_tensor(x, dtype=torch.float64, device=self.device).view(()) for x in measured)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"metric {name}: measure() must return (sum, count), two numbers or tensors of one, not {measured!r}"
            ) from None
        return torch.stack([total, count])

    def take(self) -> Tensor:
        """[metrics * 2]: sums and counts of this rank since the last call."""
        taken, self._totals = self._totals, torch.zeros_like(self._totals)
        return taken.flatten()

    def report(self, summed: Tensor, interval: Interval) -> dict[str, float | None]:
        """Name -> mean; None without a count."""
        values = zip(self.metrics, summed.view(-1, 2).tolist(), strict=True)
        return {name: total / count if count else None for name, (total, count) in values}
