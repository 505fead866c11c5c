"""Losses of the log interval by row: sums that modules add up in the passes, of each data set of a blend and of each
depth of multi-token prediction.

The last pipeline stage adds the losses of a sample to its source's row (--log-source-loss). Totals stay on the device
and travel with the reduction of the log, or of the evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.training.hooks import Meter
from megatron.training.progress import Interval


class Tallies(Meter):
    """Adds up the tallies of a rank's modules over the steps of a log interval.

    `tallies` are tensors of one shape that the modules add to. `counts` says whether this rank's count: tensor-parallel
    ranks have the same.
    """

    def __init__(self, tallies: Sequence[Tensor], rows: int, counts: bool, device: torch.device) -> None:
        self.tallies, self.counts = list(tallies), counts
        self.totals = torch.zeros(rows, 2, dtype=torch.float64, device=device)
        """Loss sum and tokens, by row, since the last record."""

    def end_step(self, skip: Tensor) -> None:
        """Adds the tally of a step to the totals, unless `skip` is 1."""
        for tally in self.tallies if self.counts else ():
            self.totals += torch.where(skip > 0, 0.0, tally)
        self.discard_step()

    def step_state(self) -> list[Tensor]:
        return [*self.tallies, self.totals]

    def discard_step(self) -> None:
        for tally in self.tallies:
            tally.zero_()

    def take(self) -> Tensor:
        """[rows * 2]: loss sums and tokens of this rank since the last call."""
        taken, self.totals = self.totals, torch.zeros_like(self.totals)
        return taken.flatten()


def means(summed: Tensor) -> list[float | None]:
    """Mean of each row of `take` summed over the world; None where no token counted."""
    return [total / count if count else None for total, count in summed.view(-1, 2).tolist()]


class SourceLosses(Tallies):
    """The losses by source on one rank. `names` are the sources; none if nothing is logged."""

    def __init__(
        self, names: Sequence[str], state: ParallelState, stages: Mapping[int, GPTModel], device: torch.device
    ) -> None:
        self.names, tallies = list(names), []
        for model in stages.values():
            if names and model.last:
                model.source_tally = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
                tallies.append(model.source_tally)
        super().__init__(tallies, len(names), state.tp.first, device)

    def report(self, summed: Tensor, interval: Interval) -> dict[str, float | None]:
        """Mean loss of each source; None where no token of it counted."""
        return {f"source_{name}_loss": mean for name, mean in zip(self.names, means(summed), strict=True)}

    def report_evaluation(self, summed: Tensor, split: str) -> dict[str, float]:
        found = zip(self.names, means(summed), strict=True)
        return {f"{split}_source_{name}_loss": mean for name, mean in found if mean is not None}

    @contextmanager
    def evaluating(self) -> Iterator[Tensor]:
        """What evaluations in this block add up on this rank, [sources, 2] float64, when it ends. A training step that
        is not settled yet keeps its tallies."""
        kept = [tally.clone() for tally in self.tallies]
        self.discard_step()
        found = torch.zeros_like(self.totals)
        yield found
        for tally, before in zip(self.tallies, kept, strict=True):
            if self.counts:
                found += tally
            tally.copy_(before)


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
