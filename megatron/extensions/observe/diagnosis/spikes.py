"""Detection of steps whose loss or gradient norm is far above its running mean (--check-for-spiky-loss,
--check-for-large-grads)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.extensions.observe.diagnosis.flags import SpikeFlags
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback

WINDOW = 100
"""Number of steps in the running means of loss and gradient norm."""

WARM_UP = 10
"""Minimum number of steps in a running mean before new steps are compared with it."""


class StepJudge:
    """Spike detection that compares the loss and the gradient norm with their running means, on the device."""

    def __init__(self, config: RunConfig, device: torch.device, means: tuple[float, ...]) -> None:
        self.skips, own = config.checks.max_skipped_iterations > 0, config.options(SpikeFlags)
        factors = [
            own.spiky_loss_factor if own.check_for_spiky_loss else torch.inf,
            own.large_grads_factor if own.check_for_large_grads else torch.inf,
        ]
        self.factors = torch.tensor(factors, dtype=torch.float64, device=device)
        self.state = torch.tensor(means or (0.0, 0.0, 0.0), dtype=torch.float64, device=device)
        """Running mean of the loss, running mean of the gradient norm, and the number of steps that contributed to
        these means."""

    def __call__(self, norm: Tensor, overflow: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return two flags (1 or 0): whether to skip the step, and whether the step is a spike. A skipped step is not
        included in the means."""
        values = torch.stack([sums[0] / sums[1].clamp(min=1.0), norm])
        means, count = self.state[:2], self.state[2]
        above = (values > self.factors * means).any() & (count >= WARM_UP)
        spike = above.to(torch.float64) * (1.0 - overflow)
        skip = spike if self.skips else torch.zeros_like(spike)
        moved = torch.cat([means + (values - means) / (count + 1.0).clamp(max=WINDOW), count[None] + 1.0])
        self.state = torch.where(torch.maximum(skip, overflow) > 0, self.state, moved)
        return skip, spike


class SpikeCheck(Callback):
    """Callback that checks for spikes if a flag requests the check."""

    def judge(self, device: torch.device, means: tuple[float, ...]) -> StepJudge:
        return StepJudge(self.config, device, means)
