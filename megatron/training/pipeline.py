"""Runs a step's micro-batches through this rank's pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron.core.batch import Batch
from megatron.core.batch_overlap import BatchOverlap
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parts import MICROBATCH_RUNNERS
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.p2p import PipelineP2P
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.training.config.run_config import RunConfig
from megatron.training.initialize import Runtime


class Pipeline:
    """Runs any number of micro-batches through the stages, in the order of the pipeline schedule."""

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        stages: dict[int, GPTModel],
        queue: WeightGradQueue,
        casts: WeightCasts,
        overlap: BatchOverlap,
    ) -> None:
        self.schedule, self.pp = config.parallel.schedule, runtime.state.pp
        self.group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        self.shards = runtime.state.tp.size if config.parallel.sequence_parallel else 1
        """Ranks that hold parts of a sequence's hidden states."""
        self.in_turns = config.parallel.overlap_moe_expert_parallel_comm
        self.post_validation = config.optimizer.optimizer_post_validation
        self.stages = stages
        self.layout = pipeline_layout(config.model, config.parallel)
        shape, dtype = hidden_shape(config, runtime.state.tp.size), getattr(torch, config.parallel.params_dtype)
        p2p = PipelineP2P(self.pp, shape, dtype, runtime.device, lanes=runtime.state.lanes)
        self.executor = PipelineExecutor(stages, self.layout, p2p, queue, casts, overlap)
        self.graph: Any = None
        """The entry of MICROBATCH_RUNNERS that trains in place of the executor."""
        if (runner := config.parallel.microbatch_runner) is not None:
            self.graph = MICROBATCH_RUNNERS[runner].build(config.parallel, self._one, runtime.device, casts)

    @property
    def loss_rank(self) -> int:
        """The pipeline rank that holds the last stage and computes the loss."""
        return self.layout.rank_of(self.layout.num_stages - 1)

    def train(self, batches: list[Batch], seed: float, replay: bool = True) -> list[torch.Tensor]:
        """Forward, and backward of `seed` * loss sum. The loss sum of each micro-batch on the last stage, else [].

        Without `replay` the executor alone is used, so that hooks of modules run, and each action runs by itself."""
        if self.graph is not None and replay:
            losses: list[torch.Tensor] = self.graph.train(batches, seed)
            return losses
        return self.executor.run(
            self._actions(len(batches), False, self.in_turns and replay), batches, loss_scale_seed=seed
        )

    def _one(self, batch: Batch, seed: torch.Tensor) -> torch.Tensor:
        (loss,) = self.executor.run(self._actions(1, False), [batch], loss_scale_seed=seed)
        return loss

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Turns off dropout and whatever else modules do only in training."""
        for stage in self.stages.values():
            stage.eval()
        try:
            yield
        finally:
            for stage in self.stages.values():
                stage.train()

    def evaluate(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Forward passes only. The loss sum of each micro-batch on the last stage, else []."""
        return self.executor.run(self._actions(len(batches), True), batches)

    def token_scores(self, batches: list[Batch]) -> list[torch.Tensor]:
        """`GPTModel.token_scores` of each micro-batch on the last stage, else []. The micro-batches have one shape, any
        that the layout can compute."""
        b, s = batches[0].tokens.shape
        shape = (s // self.shards, b, self.executor.p2p.shape[-1])
        with self.executor.p2p.shaped(shape):
            actions = self._actions(len(batches), True)
            return self.executor.run(actions, batches, last_forward=GPTModel.token_scores)

    def _actions(self, num_microbatches: int, evaluate: bool, in_turns: bool = False) -> Sequence[Action]:
        chunks = self.layout.chunks
        post_validation = self.post_validation and not evaluate
        lists = pipeline_lists(
            self.schedule, self.pp.size, num_microbatches, chunks, evaluate, self.group, in_turns, post_validation
        )
        return lists[self.pp.rank]


def hidden_shape(config: RunConfig, tp_size: int) -> tuple[int, int, int]:
    """Shape of the activations that one stage sends to the next: [s, b, h], or [s/tp, b, h] under sequence
    parallelism."""
    s = config.model.seq_length // config.parallel.context_parallel_size
    if config.parallel.sequence_parallel:
        s //= tp_size
    return s, config.training.micro_batch_size, config.model.hidden_size
