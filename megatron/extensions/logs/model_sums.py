"""Norm of all parameters and zeros in the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer.clip_grads import sum_of_squares
from megatron.extensions.logs.flags import LogsConfig
from megatron.training.hooks import Callback, Meter
from megatron.training.progress import Interval
from megatron.training.run import TrainingRun


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
