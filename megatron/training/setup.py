"""Builds everything a run consists of from its configuration, in the order in which the parts need each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron.core.attention.backend_choice import AttentionShape, choose_kernel
from megatron.core.dist_checkpointing.async_saver import CheckpointSaver
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.fp8.delayed_scaling import DelayedScaling
from megatron.core.fp8.recipes import WeightCasts
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer, build_optimizer
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.stages import pipeline_layout, pipeline_stages, tied_stages
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.training.checkpointing import Progress, build_saver, load_checkpoint
from megatron.training.config.batch_size import BatchSizes
from megatron.training.config.run_config import RunConfig
from megatron.training.data import TrainingData, build_data
from megatron.training.diagnosis.step_guard import StepGuard
from megatron.training.diagnosis.straggler import PhaseClock
from megatron.training.expert_load import ExpertLoad
from megatron.training.initialize import Runtime
from megatron.training.pipeline import Pipeline
from megatron.training.sample_log import SampleLog


@dataclass
class TrainingRun:
    """One rank's parts of a run. `progress` changes with every step; the rest is built once."""

    config: RunConfig
    runtime: Runtime
    stages: dict[int, GPTModel]
    ddp: DistributedDataParallel
    optimizer: MixedPrecisionOptimizer
    scheduler: OptimizerParamScheduler
    pipeline: Pipeline
    data: TrainingData
    batch_sizes: BatchSizes
    train_iters: int
    progress: Progress
    experts: ExpertLoad
    scaling: DelayedScaling
    saver: CheckpointSaver | None
    """None where nothing is saved."""

    guard: StepGuard
    clock: PhaseClock

    sample_log: SampleLog | None = None
    """None where it is not asked for."""

    measured: dict[str, float | None] = field(default_factory=dict)
    """Metrics of the present iteration, as far as they were measured."""

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.parallel.params_dtype)


def build_stages(
    config: RunConfig,
    runtime: Runtime,
    queue: WeightGradQueue,
    casts: WeightCasts | None = None,
    initialize: bool = True,
) -> dict[int, GPTModel]:
    """This rank's pipeline stages, with initial weights that do not depend on the layout."""
    state, model = runtime.state, config.model
    layout = pipeline_layout(model, config.parallel)
    holds = pipeline_stages(model, config.parallel)
    stages: dict[int, GPTModel] = {}
    for stage in layout.stages_of(state.pp.rank):
        embedding = stages[0].embedding if 0 in stages else None
        stages[stage] = GPTModel(
            model,
            config.parallel,
            state,
            layers=holds[stage].layers,
            first=holds[stage].first,
            last=holds[stage].last,
            tied_stages=tied_stages(model, layout),
            tied_weight=embedding.word_embeddings.weight if embedding is not None else None,
            queue=queue,
            casts=casts,
            device=runtime.device,
            seed=config.training.seed,
            initialize=initialize,
        )
    return stages


def attention_shape(config: RunConfig) -> AttentionShape | None:
    """What attention of this rank's layers is like in training, where torch picks the kernel for it and may pick by
    measurements; None where another one computes it, or every run must be the same."""
    model, parallel, dtype = config.model, config.parallel, getattr(torch, config.parallel.params_dtype)
    windowed = model.window_size is not None and model.window_size < model.seq_length
    elsewhere = windowed or model.attention_dropout > 0 or config.data.reset_attention_mask
    if elsewhere or parallel.context_parallel_size > 1 or dtype.itemsize != 2 or config.training.deterministic:
        return None
    tp = parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads // tp, model.query_groups // tp
    return AttentionShape(model.seq_length, config.training.micro_batch_size, heads, groups, model.head_dim, dtype)


def choose_attention(config: RunConfig, runtime: Runtime) -> None:
    """Has torch use the fastest attention kernel there is for this model on this GPU. Collective."""
    shape = attention_shape(config)
    if runtime.device.type == "cuda" and shape is not None:
        runtime.say(f" {choose_kernel(shape, runtime.device, runtime.state.world)}")


def build_scheduler(config: RunConfig, train_iters: int) -> OptimizerParamScheduler:
    """The schedule, in samples if the run's length was given in samples or tokens, else in iterations."""
    training = config.training
    assert training.global_batch_size is not None
    if training.train_samples is not None:
        return OptimizerParamScheduler(
            config.optimizer, training.global_batch_size, train_samples=training.train_samples
        )
    return OptimizerParamScheduler(config.optimizer, training.global_batch_size, train_iters=train_iters)


def build_run(config: RunConfig, runtime: Runtime) -> TrainingRun:
    """Model, gradient buffers, optimizer, data; then the checkpoint, where there is one to load."""
    phases, state = runtime.phases, runtime.state
    queue, casts = WeightGradQueue(), WeightCasts()
    with phases("data"):
        batch_sizes = BatchSizes.from_config(config.training)
        data, train_iters = build_data(config, runtime, batch_sizes)
    with phases("model"):
        stages = build_stages(config, runtime, queue, casts)
        scaling = DelayedScaling(config.parallel, stages.values(), state.axis("stage"))
        choose_attention(config, runtime)
    with phases("optimizer"):
        ddp = DistributedDataParallel(
            config.ddp, config.parallel, state, list(stages.values()), config.optimizer.use_distributed_optimizer
        )
        optimizer = build_optimizer(config.optimizer, ddp, state)
        scheduler = build_scheduler(config, train_iters)
    with phases("checkpoint"):
        progress = load_checkpoint(config, state, stages, optimizer, runtime.say, data.fingerprint)
        scaling.refresh()
        saver = build_saver(config, state.world, progress)
    path = config.logging.sample_log
    sample_log = SampleLog(Path(path), data.train.dataset, state, progress.iteration) if path else None
    pipeline = Pipeline(config, runtime, stages, queue, casts)
    experts = ExpertLoad(config.model, state, stages, runtime.device)
    clock = PhaseClock(runtime.device, config.logging.log_straggler)
    pipeline.executor.timed = clock
    return TrainingRun(
        config,
        runtime,
        stages,
        ddp,
        optimizer,
        scheduler,
        pipeline,
        data,
        batch_sizes,
        train_iters,
        progress,
        experts,
        scaling,
        saver,
        StepGuard(config.checks, runtime.device, progress.running_means),
        clock,
        sample_log,
    )
