"""Losses of multi-token prediction for the log: means over the tokens that count at a depth, without their weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.training.metrics.interval import Interval
from megatron.training.metrics.source_losses import Tallies, means


class MultiTokenLosses(Tallies):
    """What the modules of a rank have tallied: in the present step, and since the last record."""

    def __init__(
        self, config: TransformerConfig, state: ParallelState, stages: Mapping[int, GPTModel], device: torch.device
    ) -> None:
        self.modules = [model.mtp for model in stages.values() if model.mtp is not None]
        super().__init__([module.tally for module in self.modules], config.mtp_depths, state.tp.first, device)

    def weighted_sum(self) -> Tensor:
        """What the step so far has added to the loss sum that is trained, and not to the one that is reported. float64
        scalar, 0 on ranks whose tallies do not count."""
        parts = [module.weight * module.tally[:, 0].sum() for module in self.modules if self.counts]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self.totals.device)

    def report(self, summed: Tensor, interval: Interval) -> dict[str, float | None]:
        """Mean loss by depth from 1; None where no token counted."""
        return {f"mtp_loss_{depth}": mean for depth, mean in enumerate(means(summed), 1)}
