"""Gradients of one step. The training loop, the search for a NaN and a replay share this code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.batch import Batch
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import global_token_count
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Meter
from megatron.training.initialize import Runtime
from megatron.training.pipeline import Pipeline
from megatron.training.progress import Step


@dataclass(frozen=True)
class Sums:
    """Results of the forward and backward passes of a step, besides gradients."""

    seed: float
    """Factor that every loss sum was multiplied by before the backward."""

    total_tokens: torch.Tensor
    """Valid tokens of the global batch; scalar float64 on every rank."""

    loss_and_tokens: torch.Tensor
    """[loss sum, valid tokens] float64: a plain sum over the world counts each token once."""


@dataclass(frozen=True)
class ForwardBackward:
    """Runs the forward and backward passes of a step on this rank's stages. All methods are collective."""

    config: RunConfig
    runtime: Runtime
    ddp: DistributedDataParallel
    pipeline: Pipeline
    meters: Sequence[Meter]

    def __call__(self, step: Step, batches: list[Batch], loss_scale: float) -> Sums:
        """Adds the gradients of the step's loss sums, times the seed, to the gradient buffers."""
        self.ddp.begin_step(len(batches), overwrite=self.pipeline.graph is None)
        seed = self.loss_seed(loss_scale)
        scaled, total_tokens = self.with_scale(step, batches, seed)
        losses = self.pipeline.train(scaled, seed)
        self.ddp.zero_stale_grads()
        return Sums(seed, total_tokens, loss_and_tokens(losses, count_tokens(batches), self.runtime))

    def loss_seed(self, loss_scale: float) -> float:
        """The factor of loss sums. In fp16 the loss scale fits the mean over a sample's tokens, not their sum."""
        return loss_scale / (self.config.model.seq_length if self.config.parallel.fp16 else 1)

    def with_scale(self, step: Step, batches: list[Batch], seed: float) -> tuple[list[Batch], torch.Tensor]:
        """(micro-batches with the factor of auxiliary losses, valid tokens of the global batch)."""
        # Ranks count the same: none waits for the loss rank, which may still be in the step before.
        loss_rank = None if self.pipeline.post_validation else self.pipeline.loss_rank
        total = global_token_count(count_tokens(batches), self.runtime.state, loss_rank)
        scale = total * (seed / (step.samples * self.config.model.seq_length))
        for meter in self.meters:
            batches = meter.with_scales(batches, scale)
        return batches, total

    def end_step(self, skip: torch.Tensor) -> None:
        """Updates expert biases, scales and what is logged with an update of the weights, unless `skip` is 1."""
        for meter in self.meters:
            meter.end_step(skip)

    def step_state(self) -> list[torch.Tensor]:
        """The tensors that `end_step` changes."""
        return [tensor for meter in self.meters for tensor in meter.step_state()]

    def discard_step(self) -> None:
        """Drops the gradients and counts of a step that will not update the weights."""
        self.ddp.zero_grad_buffer()
        for meter in self.meters:
            meter.discard_step()


def count_tokens(batches: list[Batch]) -> torch.Tensor:
    """Valid tokens of this rank's micro-batches; a scalar on the device."""
    return torch.stack([batch.num_tokens for batch in batches]).sum()


def loss_and_tokens(losses: list[torch.Tensor], num_tokens: torch.Tensor, runtime: Runtime) -> torch.Tensor:
    """[loss sum, tokens] in fp64 on one rank of each data-parallel replica's last stage, zeros elsewhere, so that
    a plain sum over the world counts each token once."""
    if losses and runtime.state.tp.first:
        return torch.stack([torch.stack(losses).double().sum(), num_tokens.double()])
    return torch.zeros(2, dtype=torch.float64, device=runtime.device)
