"""QK-clip (MuonClip): after an update, scale down the query and key projections of each head whose largest attention
logit exceeds a threshold.

QK-clip is algorithm 1 of Kimi K2 (arXiv 2507.20534, section 2.1). The largest logit of a head is the maximum over all
samples of a step, on all data- and context-parallel ranks. If the largest logit S of a head exceeds the threshold tau,
the factor tau / S is divided between the head's queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.attention.core_attention import CoreAttention
from megatron.core.attention.logits import AttentionWithRows, HeadRows, LargestLogits, RowKind
from megatron.core.collectives import all_reduce_
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import OptimizerShard
from megatron.core.parallel_state import ParallelState
from megatron.extensions.optim.optimizers.flags import QKClipFlags
from megatron.training.hooks import Callback, Meter
from megatron.training.run import TrainingRun


class QKClip:
    """QK-clip on one rank. This class reads the largest logits of the rank's attention layers, and scales the rank's
    shard of the main parameters."""

    def __init__(
        self,
        config: OptimizerConfig,
        modules: Iterable[nn.Module],
        shards: Sequence[OptimizerShard],
        state: ParallelState,
    ) -> None:
        options = config.options(QKClipFlags)
        self.threshold = options.qk_clip_threshold
        self.alpha = options.qk_clip_alpha
        self.shards = shards
        self.data = state.dp_cp
        """Ranks that compute the same attention heads for different tokens."""
        every: dict[int, Any] = {id(layer): layer for module in modules for layer in module.modules()}
        self.layers: list[AttentionWithRows] = [
            layer for layer in every.values() if isinstance(getattr(layer, "core", None), CoreAttention)
        ]
        self.logits = [LargestLogits(layer.core) for layer in self.layers]

    def largest(self) -> list[Tensor]:
        """Return the largest logits [heads/tp] of each layer over all samples since the last call. This method is a
        collective over `data`."""
        if not self.logits:
            return []
        joined = all_reduce_(torch.cat([logits.values for logits in self.logits]), self.data, dist.ReduceOp.MAX)
        for logits in self.logits:
            logits.clear()
        return list(joined.split([len(logits.values) for logits in self.logits]))

    def after_update(self, skip: Tensor) -> None:
        """Multiply the query and key projections in this rank's shard of the main parameters by their QK-clip factors.
        If `skip` is 1, all factors are 1."""
        factors: dict[str, Tensor] = {}
        for layer, largest in zip(self.layers, self.largest(), strict=True):
            above = (largest > self.threshold) & (skip == 0)
            eta = torch.where(above, self.threshold / largest, torch.ones_like(largest))
            for rows in layer.logit_rows():
                scales = clip_factors(rows, eta, self.alpha)
                for param in rows.linear.parameters():
                    factors[param.meta.name] = scales  # type: ignore[attr-defined]
        for shard in self.shards:
            for piece, span in shard.owned_pieces(*shard.range):
                if (of_rows := factors.get(piece.meta.name)) is not None:
                    mine = shard.main[span]
                    columns = piece.meta.global_shape[-1] if piece.meta.name.endswith("weight") else 1
                    mine.mul_(of_elements(of_rows, columns, piece.start, piece.stop).to(mine.dtype))


class ClipsLogits(Callback):
    """Callback that applies QK-clip after each update of a run."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        shards = [shard for shard in run.optimizer.shards if isinstance(shard, OptimizerShard)]
        clip = QKClip(run.config.optimizer, run.ddp.modules, shards, run.runtime.state)
        run.optimizer.after_update.append(clip.after_update)
        return ()


def clip_factors(rows: HeadRows, eta: Tensor, alpha: float) -> Tensor:
    """Return factors [groups/tp, rows] for the rows of a projection. `eta` [heads/tp] contains one factor per head,
    which is at most 1. Multiplied by this factor, the largest logit of the head would not exceed the threshold. The
    product of the returned query and key factors is at most the eta of the head.

    Queries are multiplied by eta^alpha, and keys by eta^(1 - alpha). All heads in a query group use the smallest eta of
    the group. A key that all heads share is not scaled; in this case, the queries are multiplied by eta.
    """
    of_groups = eta.unflatten(0, (-1, rows.heads)).amin(1, keepdim=True)
    powers = {
        RowKind.QUERY: alpha,
        RowKind.KEY: 1 - alpha,
        RowKind.QUERY_OF_SHARED_KEY: 1.0,
        RowKind.OTHER: 0.0,
    }
    return torch.cat([of_groups.pow(powers[kind]).expand(-1, number) for kind, number in rows.rows], dim=1)


def of_elements(of_rows: Tensor, columns: int, start: int, stop: int) -> Tensor:
    """Return one QK-clip factor per element, for the elements [start, stop) of this rank's flattened parameter.

    Args:
        of_rows: [groups, rows], factors of the rows of the parameter.
        columns: Number of elements in each row.
        start: Index of the first element.
        stop: Index after the last element.
    """
    low, high = start // columns, -(-stop // columns)
    return of_rows.flatten()[low:high].repeat_interleave(columns)[start - low * columns : stop - low * columns]
