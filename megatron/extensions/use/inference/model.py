"""Loading of a checkpoint's model for generation, on one or several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath

import torch
import torch.distributed as dist

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.core.tokenizers import Tokenizer, build_tokenizer, tokenize_beginning
from megatron.extensions.speed.cpu_half.products import choose_products
from megatron.extensions.use.inference.generation import Engine, StageRunner
from megatron.extensions.use.inference.kept_files import found_tokenizer
from megatron.training.checkpoints.checkpointing import load_stages
from megatron.training.config.flags import run_of
from megatron.training.config.problem import Problem
from megatron.training.config.rules.model import attention, linear_attention, mixers, tensor_parallel
from megatron.training.config.rules.moe import experts
from megatron.training.config.rules.parallel import world
from megatron.training.config.rules.pipeline import pipeline
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve
from megatron.training.initialize import StartupPhases, initialize, shut_down
from megatron.training.reliability.launch import Launch

RULES = (world, attention, tensor_parallel, linear_attention, mixers, experts, pipeline)
"""Validation rules for combinations of a model and a parallel layout."""


@dataclass(frozen=True)
class LoadedModel:
    """Model for generation. Its pipeline stages are distributed over the ranks."""

    runner: StageRunner
    tokenizer: Tokenizer
    tokenizer_config: TokenizerConfig
    config: RunConfig
    """Configuration of the run that saved the checkpoint. For a Hugging Face folder, the configuration contains only
    the model, tokenizer and number format."""

    layout: ModelParallelConfig = field(default_factory=ModelParallelConfig)
    """Parallel layout for generation."""

    state: ParallelState = field(default_factory=ParallelState)

    @property
    def leads(self) -> bool:
        """True if this rank accepts requests. The other ranks call `runner.follow()`."""
        return self.runner.leads

    def engine(self, rows: int) -> Engine:
        return Engine(self.runner, self.tokenizer.detokenize, rows)

    def tokenize(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt. A prompt that is a list of token ids is returned unchanged. If the prompt
        results in no tokens, return the token that begins a document. Raises ValueError if such a token is needed and
        the tokenizer has none."""
        if not isinstance(prompt, str):
            return prompt
        ids = tokenize_beginning(self.tokenizer, prompt)
        start = self.tokenizer.bos if self.tokenizer.bos is not None else self.tokenizer.eod
        if not ids and start is None:
            raise ValueError("the prompt is empty, but the tokenizer has no token that begins a document")
        return ids or [int(start or 0)]


@contextmanager
def loaded_model(
    path: PurePath | str,
    layout: ModelParallelConfig,
    device: str,
    launch: Launch,
    tokenizer: TokenizerConfig | None = None,
) -> Iterator[LoadedModel]:
    """Load a model on the ranks of this launch. The model is read from a Hugging Face folder or from a checkpoint,
    which may have been saved under any parallel layout. All ranks must call this function.

    `tokenizer` replaces the run's tokenizer. If the files of the run's tokenizer no longer exist, the copies next to
    the checkpoints are used. Raises ValueError if there is no readable checkpoint, or if the layout does not match the
    model or the number of ranks.
    """
    if problem := wrong_world(layout, launch.world_size):
        raise ValueError(str(problem))
    runtime = initialize(RunConfig(parallel=replace(layout, cpu=device == "cpu")), launch, StartupPhases())
    try:
        found = torch.device(device) if launch.world_size == 1 else runtime.device
        layout_of = partial(fitting_layout, layout, launch.world_size)
        stages, config = load_stages(located(path), layout_of, runtime.state, found)
        choose_products([getattr(torch, config.parallel.params_dtype)], found, runtime.state.world)
        pipeline, control = pipeline_layout(config.model, layout), control_axis(runtime.state.world)
        runner = StageRunner(stages, runtime.state, pipeline, control)
        of_run = tokenizer or found_tokenizer(config.tokenizer, located(path))
        built = build_tokenizer(of_run, config.model.vocab_size)
        yield LoadedModel(runner, built, of_run, config, layout_of(config), runtime.state)
    finally:
        shut_down()


def control_axis(everyone: Axis) -> Axis:
    """Return a process group of the ranks in `everyone`, over which the leader sends commands to the other ranks. The
    group uses the gloo backend, so that waiting for a command does not occupy the GPU."""
    if everyone.size == 1 or dist.get_backend(everyone.group) == "gloo":
        return everyone
    return replace(everyone, group=dist.new_group(list(everyone.ranks), backend="gloo"))


def wrong_world(layout: ModelParallelConfig, world_size: int) -> Problem | None:
    """Return a `Problem` if the number of ranks does not match the parallel sizes. The ranks together must hold exactly
    one copy of the model."""
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    ep, expt_tp = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size
    expt_tp = tp if expt_tp is None else expt_tp
    named = zip(("tensor-model", "pipeline-model", "expert-model", "expert-tensor"), (tp, pp, ep, expt_tp), strict=True)
    for name, value in named:
        if value < 1:
            return Problem(f"--{name}-parallel-size", value, "must be at least 1", "nearest: 1")
    needed = pp * math.lcm(tp, ep * expt_tp)
    if world_size == needed:
        return None
    rule = f"must be {needed}: PP {pp} times the least common multiple of TP {tp} and EP * expert TP {ep * expt_tp}"
    return Problem(
        "world size", world_size, rule, f"start {needed} ranks (torchrun --nproc-per-node), or change the sizes"
    )


def fitting_layout(layout: ModelParallelConfig, world_size: int, config: RunConfig) -> ModelParallelConfig:
    """Adapt the requested parallel layout to the model of a checkpoint. Under tensor parallelism, sequence parallelism
    is enabled if the model has experts, and disabled otherwise. Raises a ValueError that lists all problems if the
    model does not support this layout."""
    ep, has_experts = layout.expert_model_parallel_size, config.model.num_experts is not None
    if ep > 1 and not has_experts:
        problem = Problem("--expert-model-parallel-size", ep, "shards experts, but the model has none", "remove it")
        raise ValueError(str(problem))
    layout = replace(layout, sequence_parallel=has_experts and layout.tensor_model_parallel_size > 1)
    run = replace(run_of(replace(config.model, mtp_num_layers=None)), parallel=layout)
    run = resolve(run, world_size)
    if problems := [problem for rule in RULES for problem in rule(run, world_size) if not problem.harmless]:
        raise ValueError("\n".join(map(str, problems)))
    return layout
