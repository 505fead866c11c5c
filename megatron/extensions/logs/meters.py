"""Losses of each data set of a blend, norm of all parameters, and zeros in the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.optimizer.clip_grads import sum_of_squares
from megatron.extensions.logs.flags import LogsConfig
from megatron.training.hooks import Callback, Meter
from megatron.training.metrics.meters import Tallies, means
from megatron.training.progress import Interval
from megatron.training.run import TrainingRun


class SourceLosses(Callback):
    """Losses of each data set of a blend (--log-source-loss)."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        run.data.add_source_ids()
        return (SourceTallies(run),)


class SourceTallies(Tallies):
    """The losses by source on one rank: the last pipeline stage adds those of a sample to the row of its source."""

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
        """Sums of evaluations in this block on this rank, [sources, 2] float64, when it ends. A training step that is
        not settled yet keeps its tallies."""
        kept = [tally.clone() for tally in self.tallies]
        self.discard_step()
        found = torch.zeros_like(self.totals)
        yield found
        for tally, before in zip(self.tallies, kept, strict=True):
            if self.counts:
                found += tally
            tally.copy_(before)


class ModelSums(Callback, Meter):
    """Sums over the elements of the model, each counted once over the world (--log-params-norm,
    --log-num-zeros-in-grad)."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        options = self.config.options(LogsConfig)
        self.run, self.norm, self.zeros = run, options.log_params_norm, options.log_num_zeros_in_grad
        return (self,)

    @torch.no_grad()
    def take(self) -> Tensor:
        """[squares of parameters, zeros in gradients] float64 of this rank's share, after an update. Main parameters
        count, and gradients as they were clipped."""
        squares = zeros = torch.zeros((), dtype=torch.float64, device=self.run.runtime.device)
        for parameter, grad in self._shards():
            if self.norm:
                squares = squares + sum_of_squares(parameter).to(squares.device)
            if self.zeros and grad is not None:
                zeros = zeros + (grad == 0).sum()
        return torch.stack([squares, zeros])

    def report(self, summed: Tensor, interval: Interval) -> dict[str, Any]:
        squares, zeros = summed.tolist()
        return ({"params_norm": squares**0.5} if self.norm else {}) | ({"num_zeros": zeros} if self.zeros else {})

    def _shards(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(values, gradient) of what this rank counts, flat; frozen parameters have no gradient."""
        state = self.run.runtime.state
        for shard in self.run.optimizer.shards:
            for piece, span in shard.owned_pieces(*shard.bucket.shard_range):
                if piece.meta.is_first_replica(state.coords) and shard.bucket.copies.first:
                    yield shard.read_main(span.start, span.stop), shard.device_grads[span]
        for stage in self.run.stages.values():
            for parameter in stage.parameters():
                meta = parameter.meta  # type: ignore[attr-defined]
                first = state.axis(meta.data_axis).rank == 0 and meta.is_first_replica(state.coords)
                if not parameter.requires_grad and first:
                    yield parameter.flatten(), None
