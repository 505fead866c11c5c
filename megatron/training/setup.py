"""Builds the parts of a run from its configuration."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import torch

from megatron.core.collectives import PassPair
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.init import initialize_parameters_
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import freeze_parameters
from megatron.core.optimizer.owned_tensors import owned_zeros
from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages
from megatron.core.transformer.activation_store import build_store
from megatron.core.transformer.pass_context import PassContext
from megatron.training.checkpoints.checkpointing import RunCheckpoint, load_start
from megatron.training.checkpoints.saving import RunSaver
from megatron.training.config.flags import with_named
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import read_history
from megatron.training.config.validation import resolve
from megatron.training.data import build_data, check_same_data
from megatron.training.forward_backward import ForwardBackward, Pipeline
from megatron.training.hooks import Meter, Parts, states_of
from megatron.training.initialize import Runtime
from megatron.training.metrics.console import LogLines
from megatron.training.metrics.expert_load import ExpertLoad
from megatron.training.metrics.log_formats import LOG_FORMATS
from megatron.training.metrics.meters import MultiTokenLosses, PeakMemory, UserMetrics
from megatron.training.plan import RunPlan, plan_of
from megatron.training.progress import Progress, StepTimers
from megatron.training.run import TrainingRun
from megatron.training.step_guard import StepGuard
from megatron.training.step_parts import step_parts
from megatron.training.train_step import TrainStep


def build_stages(
    config: RunConfig,
    runtime: Runtime,
    passes: PassContext,
    parallel: ModelParallelConfig,
) -> dict[int, GPTModel]:
    """Builds this rank's pipeline stages, by `parallel` in place of `config.parallel`. Initial weights do not depend on
    the layout."""
    state, model = runtime.state, config.model
    layout = pipeline_layout(model, config.parallel)
    holds = pipeline_stages(model, config.parallel)
    stages: dict[int, GPTModel] = {}
    tied = tied_stages(model, layout)
    weights = WeightSetup(
        runtime.device,
        config.training.seed,
        lazy=config.ddp.shards_parameters,
        threads=host_threads(runtime.device),
        rules=config.optimizer.parameter_rules,
    )
    for stage in layout.stages_of(state.pp.rank):
        stages[stage] = GPTModel(
            model,
            parallel,
            state,
            replace(holds[stage], tied_stages=tied),
            embedding=stages[0].embedding if 0 in stages else None,
            passes=passes,
            weights=weights,
            hardware=runtime.hardware,
        )
    return stages


def host_threads(device: torch.device) -> int:
    """Threads that draw initial weights and update states in host memory: the cores that each GPU of this node has, or
    torch's threads on CPU."""
    if device.type != "cuda":
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))


def _is_elsewhere(plan: RunPlan, progress: Progress) -> bool:
    """Whether a run resumes at another position than the plan was made for: the newest checkpoint is damaged, or nobody
    has looked into it before."""
    at = progress.iteration, progress.consumed_samples
    return bool(progress.past_batches) and (plan.sizes.past[-1] > at or plan.sizes.points(*at) != progress.past_batches)


def _counted_from(progress: Progress, config: RunConfig, runtime: Runtime) -> RunConfig:
    """The configuration with lengths that are counted from where the run resumes."""
    given = with_named(replace(config, past_batches=progress.past_batches), dict(config.given))
    found = resolve(given, runtime.launch.world_size, config.model.vocab_size)
    return replace(config, training=found.training, optimizer=found.optimizer, past_batches=progress.past_batches)


def build_run(config: RunConfig, runtime: Runtime, parts: Parts | None = None) -> TrainingRun:
    """Builds data, model, gradient buffers and optimizer, then loads the checkpoint if there is one. Collective.

    `parts` are all of the run (`Parts.with_registered`); by default those that extensions have registered."""
    phases, state = runtime.phases, runtime.state
    replaced = step_parts(config)
    with phases("data"):
        plan = plan_of(config).continued(read_history(config.checkpoint))
        data, plan = build_data(plan, runtime)
    with phases("inputs of extensions"):
        check_same_data(data.fingerprints, state.world)  # once all ranks have come here
        parts = parts or Parts().with_registered(config)
        for callback in parts.callbacks:
            callback.on_setup(runtime)
    with phases("model"):
        parallel = config.parallel
        for callback in parts.callbacks:
            parallel = callback.choose(plan.longest.config, parallel, runtime)
        passes = PassContext(pair=(replaced.pair or PassPair)(), offload=build_store(config.parallel, runtime.device))
        stages = build_stages(config, runtime, passes, parallel)
        for line in freeze_parameters(stages.values(), config.optimizer, state.world):
            runtime.say(f" {line}")
        for callback in parts.callbacks:
            callback.on_model(plan.longest.config, stages, runtime)
    with phases("optimizer"):
        ddp = DistributedDataParallel(
            config.ddp,
            config.parallel,
            state,
            list(stages.values()),
            config.optimizer,
            passes,
            partial(
                initialize_parameters_,
                seed=config.training.seed,
                coords=state.coords,
                threads=host_threads(runtime.device),
            ),
        )
        optimizer_type = replaced.optimizer or DistributedOptimizer
        optimizer = optimizer_type(config.optimizer, ddp, state, host_threads(runtime.device))
        for callback in parts.callbacks:
            callback.states = owned_zeros(ddp, states_of(callback))
        scheduler = plan.schedule()
    with phases("checkpoint"):
        checkpoint = RunCheckpoint(config, state, stages, optimizer, plan, parts.callbacks)
        progress = load_start(checkpoint, runtime.say, data.fingerprint_at)
        if _is_elsewhere(plan, progress):
            config = _counted_from(progress, config, runtime)
            data.close()
            data, plan = build_data(plan_of(config).continued(read_history(config.checkpoint)), runtime)
            checkpoint = replace(checkpoint, config=config, plan=plan)
        lines: LogLines = LOG_FORMATS.build(config.logging.log_format, config, plan.iterations)
        lines.metrics = tuple(parts.metrics)
        saver = RunSaver(checkpoint, runtime, progress, lines)
    pipeline = (replaced.pipeline or Pipeline)(config, runtime, stages, passes)
    timers = pipeline.executor.timed = StepTimers()
    meters: list[Meter] = [
        ExpertLoad(config.model, state, stages, runtime.device),
        MultiTokenLosses(config.model, state, stages, runtime.device),
        UserMetrics(parts.metrics, runtime.device),
        PeakMemory(state.world, runtime.device),
    ]
    judges = (callback.judge(runtime.device, progress.running_means) for callback in parts.callbacks)
    judge = next(filter(None, judges), None)
    run = TrainingRun(
        config=config,
        plan=plan,
        runtime=runtime,
        stages=stages,
        ddp=ddp,
        optimizer=optimizer,
        scheduler=scheduler,
        pipeline=pipeline,
        forward_backward=ForwardBackward(config, runtime, ddp, pipeline, meters),
        data=data,
        batch_sizes=plan.sizes,
        train_iters=plan.iterations,
        progress=progress,
        saver=saver,
        lines=lines,
        guard=StepGuard(config.checks, progress, optimizer, parts.callbacks, judge, runtime.say),
        timers=timers,
        first_iteration=progress.iteration,
        callbacks=parts.callbacks,
        meters=meters,
        say=runtime.say,
    )
    run.step = (replaced.step or TrainStep)(run)
    for callback in parts.callbacks:
        meters.extend(callback.meters(run))
    plan.enter(run)
    return run
