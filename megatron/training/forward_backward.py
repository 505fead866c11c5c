"""One step up to its gradients: what the training loop, the search for a NaN and a replay do alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.core.batch import Batch
from megatron.core.distributed.finalize_model_grads import global_token_count
from megatron.training.data import put_on_device

if TYPE_CHECKING:
    from megatron.training.setup import TrainingRun


@dataclass(frozen=True)
class Step:
    """Which step of a run this is."""

    iteration: int
    """As logs, files and messages number it: the first is 1."""

    first_sample: int
    """Samples consumed before it, and so the number of its first one."""

    samples: int
    """Its global batch size."""

    @classmethod
    def next_of(cls, run: TrainingRun) -> Step:
        consumed = run.progress.consumed_samples
        return cls(run.progress.iteration + 1, consumed, run.batch_sizes.at(consumed))


@dataclass(frozen=True)
class Sums:
    """What forward and backward passes leave behind beside gradients."""

    seed: float
    """What every loss sum was multiplied by before the backward."""

    total_tokens: torch.Tensor
    """Valid tokens of the global batch; scalar float64 on every rank."""

    loss_and_tokens: torch.Tensor
    """[loss sum, valid tokens] float64: a plain sum over the world counts each token once."""


def read_batches(run: TrainingRun, step: Step, log: bool = False) -> list[Batch]:
    """This rank's micro-batches of a step, on its device. With `log`, which is a collective, they go into the sample
    log where there is one."""
    taken = run.data.train.next_step(step.first_sample, step.samples)
    if log and run.sample_log is not None:
        run.sample_log.write(step.iteration, taken)
    return put_on_device(taken, run.runtime)


def with_scale(run: TrainingRun, step: Step, batches: list[Batch], seed: float) -> tuple[list[Batch], torch.Tensor]:
    """The micro-batches with what auxiliary losses need, and the valid tokens of the global batch. Collective."""
    total = global_token_count(count_tokens(batches), run.runtime.state, run.pipeline.loss_rank)
    return run.experts.with_scale(batches, seed, total, step.samples * run.config.model.seq_length), total


def forward_backward(run: TrainingRun, step: Step, batches: list[Batch]) -> Sums:
    """Leaves the gradients of the step's loss sums, times the seed, in the gradient buffers. Collective."""
    run.ddp.begin_step(len(batches))
    seed = loss_seed(run, run.optimizer.loss_scale)
    scaled, total_tokens = with_scale(run, step, batches, seed)
    losses = run.pipeline.train(scaled, seed)
    return Sums(seed, total_tokens, loss_and_tokens(run, losses, count_tokens(batches)))


def loss_seed(run: TrainingRun, loss_scale: float) -> float:
    """What loss sums are multiplied by. In fp16 a mean over a sample's tokens, not their sum, is what the loss scale
    brings into range."""
    return loss_scale / (run.config.model.seq_length if run.config.parallel.fp16 else 1)


def count_tokens(batches: list[Batch]) -> torch.Tensor:
    """Valid tokens of this rank's micro-batches; a scalar on the device."""
    return torch.stack([batch.num_tokens for batch in batches]).sum()


def loss_and_tokens(run: TrainingRun, losses: list[torch.Tensor], num_tokens: torch.Tensor) -> torch.Tensor:
    """[loss sum, tokens] in fp64 on one rank of each data-parallel replica's last stage, zeros elsewhere, so that
    a plain sum over the world counts each token once."""
    if losses and run.runtime.state.tp.first:
        return torch.stack([torch.stack(losses).double().sum(), num_tokens.double()])
    return torch.zeros(2, dtype=torch.float64, device=run.runtime.device)
