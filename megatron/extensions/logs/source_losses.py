"""Losses of each data set of a blend (--log-source-loss).

The last pipeline stage adds the losses of a sample to the row of its source. Totals stay on the device and travel with
the reduction of the log, or of the evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.training.hooks import Callback, Meter
from megatron.training.metrics.meters import Tallies, means
from megatron.training.progress import Interval
from megatron.training.run import TrainingRun


class SourceLosses(Callback):
    """--log-source-loss."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        run.data.add_source_ids()
        return (SourceTallies(run),)


class SourceTallies(Tallies):
    """The losses by source on one rank."""

    def __init__(self, run: TrainingRun) -> None:
        self.names, state, device = run.data.sources, run.runtime.state, run.runtime.device
        last = [model for model in run.stages.values() if model.last]
        tallies = [torch.zeros(len(self.names), 2, dtype=torch.float64, device=device) for _ in last]
        super().__init__(tallies, len(self.names), state.tp.first, device)
        for model in last:
            model.loss_watchers.append(self._add)

    def _add(self, losses: Tensor, batch: Batch) -> None:
        """Adds the loss sum and the tokens of each sample to the row of its source: losses [s, b]."""
        if batch.source_ids is not None:
            (tally,), mask = self.tallies, batch.loss_mask
            sums = (losses.t() * mask.to(losses.dtype)).sum(dim=1, dtype=tally.dtype)
            counts = torch.stack((sums, mask.sum(dim=1, dtype=tally.dtype)), dim=1)
            tally.index_add_(0, batch.source_ids, counts)

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
