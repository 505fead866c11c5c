"""Callback that scales the gradients of the indexer loss and logs its mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from megatron.core.batch import Batch
from megatron.extensions.attention.sparse_attention.sparse_attention import SelectedKeys
from megatron.training.hooks import Callback, Meter
from megatron.training.metrics.meters import Tallies, means
from megatron.training.progress import Interval
from megatron.training.run import TrainingRun


class IndexerLoss(Callback):
    """Scale the gradients of the indexer loss, and log its mean."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        return (IndexerTallies(run),)


class IndexerTallies(Tallies):
    """Sum of the divergence over the tokens and layers of one rank. Under sequence parallelism, tensor-parallel ranks
    have different tokens."""

    def __init__(self, run: TrainingRun) -> None:
        modules = [module for model in run.stages.values() for module in model.modules()]
        tallies = [module.tally for module in modules if isinstance(module, SelectedKeys)]
        counts = run.runtime.state.tp.first or run.config.parallel.sequence_parallel
        super().__init__(tallies, 1, counts, run.runtime.device)

    def with_scales(self, batches: list[Batch], scale: Tensor) -> list[Batch]:
        """Return the micro-batches with `scale` as the factor of auxiliary loss gradients."""
        return [replace(batch, aux_scale=scale) for batch in batches]

    def report(self, summed: Tensor, interval: Interval) -> dict[str, object]:
        """Return the mean divergence per token and layer, in nats. The mean is None if no indexer is trained."""
        return {"indexer_loss": means(summed)[0]}
