"""Forward and backward passes of a step on a rank's pipeline stages. Training, the replay of a saved step, and the
search for the cause of a NaN all run their passes through this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron.core.batch import Batch
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import global_token_count
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.actions import Lists
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.p2p import PipelineP2P
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.core.transformer.pass_context import PassContext
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Meter
from megatron.training.initialize import Runtime
from megatron.training.progress import Step


@dataclass(frozen=True)
class Sums:
    """Results of the forward and backward passes of a step, except gradients."""

    seed: float
    """Factor by which each loss sum was multiplied before its backward pass."""

    total_tokens: torch.Tensor
    """Number of valid tokens in the global batch, as a float64 scalar on every rank."""

    loss_and_tokens: torch.Tensor
    """[loss sum, valid tokens] in float64. A sum over all ranks counts each token once."""


@dataclass(frozen=True)
class StepInput:
    """Inputs to the forward and backward passes of a step."""

    step: Step
    batches: list[Batch]
    """This rank's micro-batches, on its device."""

    scaled: list[Batch]
    """The micro-batches in `batches`, with the gradient factor for auxiliary losses added (`Batch.aux_scale`)."""

    total_tokens: torch.Tensor
    """Number of valid tokens in the global batch, as a float64 scalar on every rank."""

    seed: float
    """Factor by which each loss sum is multiplied before the backward pass."""


@dataclass(frozen=True)
class ForwardBackward:
    """Runner of the forward and backward passes of a step on this rank's stages. All methods are collective."""

    config: RunConfig
    runtime: Runtime
    ddp: DistributedDataParallel
    pipeline: Pipeline
    meters: Sequence[Meter]

    def __call__(self, step: Step, batches: list[Batch], loss_scale: float) -> Sums:
        """Run the passes of a step, which add the gradients of the scaled loss sums to the gradient buffers."""
        return self.gradients(self.prepared(step, batches, loss_scale))

    def prepared(self, step: Step, batches: list[Batch], loss_scale: float) -> StepInput:
        """Prepare a step's micro-batches for the forward and backward passes."""
        seed = self.loss_seed(loss_scale)
        return StepInput(step, batches, *self.with_scale(step, batches, seed), seed)

    def gradients(self, given: StepInput) -> Sums:
        """Add the gradients of prepared micro-batches to the gradient buffers."""
        self.ddp.begin_step(len(given.batches), overwrite=self.pipeline.may_overwrite)
        losses = self.pipeline.train(given.scaled, given.seed)
        self.ddp.zero_stale_grads()
        own = loss_and_tokens(losses, count_tokens(given.batches), self.runtime)
        return Sums(given.seed, given.total_tokens, own)

    def loss_seed(self, loss_scale: float) -> float:
        """Return the factor by which loss sums are multiplied before the backward pass. In fp16, this factor is the
        loss scale divided by the sequence length."""
        return loss_scale / (self.config.model.seq_length if self.config.parallel.fp16 else 1)

    def with_scale(self, step: Step, batches: list[Batch], seed: float) -> tuple[list[Batch], torch.Tensor]:
        """Set the loss seed and the factor for auxiliary losses in all micro-batches. Return these micro-batches, and
        the number of valid tokens in the global batch."""
        total = global_token_count(count_tokens(batches), self.runtime.state, self.pipeline.counting_rank)
        scale = total * (seed / (step.samples * self.config.model.seq_length))
        for meter in self.meters:
            batches = meter.with_scales(batches, scale)
        if seed != 1:
            loss_seed = torch.full((), seed, dtype=torch.float64, device=self.runtime.device)
            batches = [replace(batch, loss_seed=loss_seed) for batch in batches]
        return batches, total

    def end_step(self, skip: torch.Tensor) -> None:
        """Update expert biases, scales and logged values when the weights are updated. If `skip` is 1, the step is
        skipped, and nothing is updated."""
        for meter in self.meters:
            meter.end_step(skip)

    def step_state(self) -> list[torch.Tensor]:
        """Return the tensors that `end_step` changes."""
        return [tensor for meter in self.meters for tensor in meter.step_state()]

    def discard_step(self) -> None:
        """Discard the gradients and counts of a step that does not update the weights."""
        self.ddp.zero_grad_buffer()
        for meter in self.meters:
            meter.discard_step()


def count_tokens(batches: list[Batch]) -> torch.Tensor:
    """Return the number of valid tokens in this rank's micro-batches, as a scalar on the device."""
    return torch.stack([batch.num_tokens for batch in batches]).sum()


def loss_and_tokens(losses: list[torch.Tensor], num_tokens: torch.Tensor, runtime: Runtime) -> torch.Tensor:
    """Return the fp64 tensor [loss sum, number of tokens]. The tensor is zero except on one rank of the last pipeline
    stage in each data-parallel replica. The sum of the tensors of all ranks therefore counts each token once."""
    if losses and runtime.state.tp.first:
        return torch.stack([torch.stack(losses).double().sum(), num_tokens.double()])
    return torch.zeros(2, dtype=torch.float64, device=runtime.device)


class Pipeline:
    """Pipeline that runs any number of micro-batches through the stages, in the order of the pipeline schedule.

    Extensions may replace this class with a subclass that runs the micro-batches in a different way
    (`megatron.training.step_parts`)."""

    executor_type: type[PipelineExecutor[GPTModel, Batch]] = PipelineExecutor
    may_overwrite = True
    """True if the first micro-batch of a step may overwrite gradients instead of adding to zeroed gradients."""

    def __init__(
        self, config: RunConfig, runtime: Runtime, stages: Mapping[int, GPTModel], passes: PassContext
    ) -> None:
        self.schedule, self.pp = config.parallel.schedule, runtime.state.pp
        self.group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        self.stages, self.passes = stages, passes
        self.layout = pipeline_layout(config.model, config.parallel)
        shape, dtype = hidden_shape(config, runtime.state.tp.size), getattr(torch, config.parallel.params_dtype)
        p2p = PipelineP2P(self.pp, shape, dtype, runtime.device, lanes=runtime.state.lanes)
        self.executor = self.executor_type(stages, self.layout, p2p, passes.queue, passes.casts, passes.pair)

    @property
    def counting_rank(self) -> int | None:
        """Return the pipeline rank that counts the tokens of a batch for all pipeline ranks. By default, the pipeline
        rank that computes the loss counts the tokens. If a subclass returns None, each rank counts the tokens without
        waiting for another rank.
        """
        return self.layout.rank_of(self.layout.num_stages - 1)

    def train(self, batches: Sequence[Batch], seed: float) -> list[torch.Tensor]:
        """Run the forward and backward passes of the micro-batches. Each loss sum is multiplied by `seed` before its
        backward pass. Return the loss sum of each micro-batch on the last stage, and an empty list on other stages."""
        lists = self.lists(len(batches), in_turns=self.passes.pair.in_turns)
        return self.executor.run(lists[self.pp.rank], batches, loss_scale_seed=seed)

    def train_plainly(self, batches: Sequence[Batch], seed: float) -> list[torch.Tensor]:
        """Run the same passes as `train`, but call the modules of the stages, one pipeline action at a time. Module
        hooks therefore run."""
        return self.executor.run(self.lists(len(batches))[self.pp.rank], batches, loss_scale_seed=seed)

    def evaluate(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Run the forward passes of the micro-batches, without backward passes. On the last stage, the method returns
        the loss sum of each micro-batch. On other stages, it returns an empty list."""
        lists = pipeline_lists(self.schedule, self.pp.size, len(batches), self.layout.chunks, True, self.group)
        return self.executor.run(lists[self.pp.rank], batches)

    def lists(self, microbatches: int, in_turns: bool = False) -> Lists:
        """Return the list of pipeline actions that each pipeline rank runs in a step."""
        return pipeline_lists(
            self.schedule, self.pp.size, microbatches, self.layout.chunks, group=self.group, in_turns=in_turns
        )

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Disable dropout and all other operations that modules perform only in training."""
        for stage in self.stages.values():
            stage.eval()
        try:
            yield
        finally:
            for stage in self.stages.values():
                stage.train()


def hidden_shape(config: RunConfig, tp_size: int) -> tuple[int, int, int]:
    """Return the shape of the activations that a pipeline stage sends to the next stage. The shape is [s, b, w], where
    w is the width of the residual stream, or [s/tp, b, w] under sequence parallelism. s is the number of tokens per
    context-parallel rank."""
    s = config.model.seq_length // config.parallel.context_parallel_size
    if config.parallel.sequence_parallel:
        s //= tp_size
    return s, config.training.micro_batch_size, config.model.residual_size
