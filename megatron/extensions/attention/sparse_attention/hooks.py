"""Callback that scales the gradients of the indexer loss and logs the mean of the loss."""

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
    """Callback that scales the gradients of the indexer loss and logs the mean of the loss."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        return (IndexerTallies(run),)


class IndexerTallies(Tallies):
    """Indexer loss of one rank, summed over tokens and layers. Under sequence parallelism, the sums of all
    tensor-parallel ranks are added, because these ranks have different tokens. Otherwise, only the sum of the first
    tensor-parallel rank is used."""

    def __init__(self, run: TrainingRun) -> None:
        modules = [module for model in run.stages.values() for module in model.modules()]
        tallies = [module.tally for module in modules if isinstance(module, SelectedKeys)]
        counts = run.runtime.state.tp.first or run.config.parallel.sequence_parallel
        super().__init__(tallies, 1, counts, run.runtime.device)

    def with_scales(self, batches: list[Batch], scale: Tensor) -> list[Batch]:
        """Return copies of the micro-batches in which auxiliary loss gradients are multiplied by `scale`."""
        return [replace(batch, aux_scale=scale) for batch in batches]

    def report(self, summed: Tensor, interval: Interval) -> dict[str, object]:
        """Return the mean indexer loss per token and layer, in nats; the loss is None if no indexer is trained."""
        return {"indexer_loss": means(summed)[0]}
