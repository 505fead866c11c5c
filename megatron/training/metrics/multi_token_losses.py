"""Losses of multi-token prediction for the log: means over the tokens that count at a depth, without their weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState


class MultiTokenLosses:
    """What the modules of a rank have tallied: in the present step, and since the last record."""

    def __init__(
        self, config: TransformerConfig, state: ParallelState, stages: Mapping[int, GPTModel], device: torch.device
    ) -> None:
        self.modules = [model.mtp for model in stages.values() if model.mtp is not None]
        self.counts = state.tp.first
        """Whether this rank's tallies count: tensor-parallel ranks have the same."""
        self.totals = torch.zeros(config.mtp_depths, 2, dtype=torch.float64, device=device)

    def end_step(self, skip: Tensor) -> None:
        """Adds the tally of a step to the totals, unless `skip` is 1."""
        for module in self.modules if self.counts else ():
            self.totals += torch.where(skip > 0, 0.0, module.tally)
        self.forget_step()

    def forget_step(self) -> None:
        """Drops what a step that will not be ended has tallied."""
        for module in self.modules:
            module.tally.zero_()

    def weighted_sum(self) -> Tensor:
        """What the step so far has added to the loss sum that is trained, and not to the one that is reported. float64
        scalar, 0 on ranks whose tallies do not count."""
        parts = [module.weight * module.tally[:, 0].sum() for module in self.modules if self.counts]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self.totals.device)

    def take(self) -> Tensor:
        """[N * 2]: loss sums and tokens of this rank since the last call."""
        taken, self.totals = self.totals, torch.zeros_like(self.totals)
        return taken.flatten()

    def record(self, summed: Tensor) -> dict[str, float | None]:
        """What is logged of `take` summed over the world, by depth from 1; None where no token counted."""
        rows = enumerate(summed.view(-1, 2).tolist(), 1)
        return {f"mtp_loss_{depth}": total / count if count else None for depth, (total, count) in rows}
