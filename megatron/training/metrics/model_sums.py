"""Norm of all parameters and zeros in the gradient, for the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.clip_grads import sum_of_squares
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import ParallelState
from megatron.training.config.run_config import LoggingConfig
from megatron.training.hooks import Meter
from megatron.training.progress import Interval


class ModelSums(Meter):
    """Sums over the elements of the model, each counted once over the world: `take` on every rank, add up, `record`."""

    def __init__(
        self,
        config: LoggingConfig,
        optimizer: DistributedOptimizer,
        stages: Mapping[int, GPTModel],
        state: ParallelState,
        device: torch.device,
    ) -> None:
        self.norm, self.zeros = config.log_params_norm, config.log_num_zeros_in_grad
        self.optimizer, self.stages, self.state, self.device = optimizer, stages, state, device

    @torch.no_grad()
    def take(self) -> Tensor | None:
        """[squares of parameters, zeros in gradients] float64 of this rank's share, after an update; None if neither
        is logged. Main parameters count, and gradients as they were clipped."""
        if not (self.norm or self.zeros):
            return None
        squares = zeros = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter, grad in self._shards():
            if self.norm:
                squares = squares + sum_of_squares(parameter).to(self.device)
            if self.zeros and grad is not None:
                zeros = zeros + (grad == 0).sum()
        return torch.stack([squares, zeros])

    def report(self, summed: Tensor, interval: Interval) -> dict[str, Any]:
        squares, zeros = summed.tolist()
        return ({"params_norm": squares**0.5} if self.norm else {}) | ({"num_zeros": zeros} if self.zeros else {})

    def _shards(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(values, gradient) of what this rank counts, flat; frozen parameters have no gradient."""
        for shard in self.optimizer.shards:
            for piece, span in shard.owned_pieces(*shard.bucket.shard_range):
                if piece.meta.is_first_replica(self.state.coords) and shard.bucket.copies.first:
                    yield shard.read_main(span.start, span.stop), shard.device_grads[span]
        for stage in self.stages.values():
            for parameter in stage.parameters():
                meta = parameter.meta  # type: ignore[attr-defined]
                first = self.state.axis(meta.data_axis).rank == 0 and meta.is_first_replica(self.state.coords)
                if not parameter.requires_grad and first:
                    yield parameter.flatten(), None
