"""Build a run's components from the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
from megatron.training.data import TrainingData, build_data, check_same_data
from megatron.training.forward_backward import ForwardBackward, Pipeline
from megatron.training.hooks import Callback, Meter, Parts, states_of, storage_of
from megatron.training.initialize import Runtime
from megatron.training.metrics.console import LogLines
from megatron.training.metrics.expert_load import ExpertLoad
from megatron.training.metrics.log_formats import LOG_FORMATS
from megatron.training.metrics.meters import MultiTokenLosses, PeakMemory, UserMetrics
from megatron.training.plan import RunPlan, plan_of
from megatron.training.progress import Progress
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
    """Build this rank's pipeline stages. The settings in `parallel` replace those in `config.parallel`. Initial weights
    do not depend on the layout."""
    state, model = runtime.state, config.model
    layout = pipeline_layout(model, config.parallel)
    holds = pipeline_stages(model, config.parallel)
    stages: dict[int, GPTModel] = {}
    tied = tied_stages(model, layout)
    weights = WeightSetup(
        runtime.device,
        config.training.seed,
        lazy=config.ddp.drops_parameters(config.parallel),
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
    """Return the number of threads for drawing initial weights and updating states in host memory. For training on
    GPUs, the result is the number of CPU cores of the node divided by its number of GPUs. For training on the CPU, the
    result is the number of threads that torch uses."""
    if device.type != "cuda":
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))


def _is_elsewhere(plan: RunPlan, progress: Progress) -> bool:
    """Return True if the position at which the run resumes differs from the position that its plan assumes. The
    position differs if the newest checkpoint is damaged, or if the checkpoint was not read during planning.
    """
    at = progress.iteration, progress.consumed_samples
    return bool(progress.past_batches) and (plan.sizes.past[-1] > at or plan.sizes.points(*at) != progress.past_batches)


def _counted_from(progress: Progress, config: RunConfig, runtime: Runtime) -> RunConfig:
    """Recompute the derived lengths of a run, such as the number of iterations, for the position at which the run
    resumes. Return the new configuration."""
    given = with_named(replace(config, past_batches=progress.past_batches), dict(config.given))
    found = resolve(given, runtime.launch.world_size, config.model.vocab_size)
    return replace(config, training=found.training, optimizer=found.optimizer, past_batches=progress.past_batches)


def planned_data(config: RunConfig, runtime: Runtime) -> tuple[TrainingData, RunPlan]:
    """Return the data and the plan of a run. The plan's length may depend on the data. Collective."""
    return build_data(plan_of(config).continued(read_history(config.checkpoint)), runtime)


def build_model(
    config: RunConfig, runtime: Runtime, passes: PassContext, plan: RunPlan, callbacks: Sequence[Callback]
) -> dict[int, GPTModel]:
    """Build this rank's pipeline stages with the settings that callbacks choose. This function does not allocate memory
    for gradients and optimizer states."""
    parallel, longest = config.parallel, plan.longest.config
    for callback in callbacks:
        parallel = callback.choose(longest, parallel, runtime)
    stages = build_stages(config, runtime, passes, parallel)
    for line in freeze_parameters(stages.values(), config.optimizer, runtime.state.world):
        runtime.say(f" {line}")
    for callback in callbacks:
        callback.on_model(longest, stages, runtime)
    return stages


def build_ddp(
    config: RunConfig, runtime: Runtime, passes: PassContext, stages: Mapping[int, GPTModel]
) -> DistributedDataParallel:
    """Build the gradient buffers of this rank's stages, and initialize parameters that have no values yet."""
    state = runtime.state
    initialize = partial(
        initialize_parameters_,
        seed=config.training.seed,
        coords=state.coords,
        threads=host_threads(runtime.device),
    )
    modules = list(stages.values())
    return DistributedDataParallel(config.ddp, config.parallel, state, modules, config.optimizer, passes, initialize)


def build_optimizer(
    kind: type[DistributedOptimizer],
    config: RunConfig,
    runtime: Runtime,
    ddp: DistributedDataParallel,
    callbacks: Sequence[Callback],
) -> DistributedOptimizer:
    """Build the optimizer with its states, including the states that callbacks keep for each parameter."""
    optimizer = kind(config.optimizer, ddp, runtime.state, host_threads(runtime.device))
    for callback in callbacks:
        stored = storage_of(callback)
        callback.states = owned_zeros(ddp, states_of(callback), stored.dtype, stored.on_host)
    return optimizer


def log_lines(config: RunConfig, plan: RunPlan, parts: Parts) -> LogLines:
    """Build the console lines in the format that --log-format selects."""
    lines: LogLines = LOG_FORMATS.build(config.logging.log_format, config, plan.iterations)
    lines.metrics = tuple(parts.metrics)
    return lines


def meters_of_trunk(config: RunConfig, runtime: Runtime, stages: Mapping[int, GPTModel], parts: Parts) -> list[Meter]:
    """Return the built-in meters of a run, which precede the meters of callbacks."""
    return [
        ExpertLoad(config.model, runtime.state, stages, runtime.device),
        MultiTokenLosses(config.model, runtime.state, stages, runtime.device),
        UserMetrics(parts.metrics, runtime.device),
        PeakMemory(runtime.state.world, runtime.device),
    ]


def build_guard(
    config: RunConfig,
    progress: Progress,
    optimizer: DistributedOptimizer,
    callbacks: Sequence[Callback],
    runtime: Runtime,
) -> StepGuard:
    """Build the policy for bad steps. If several callbacks provide a judge, the first judge is used."""
    judges = (callback.judge(runtime.device, progress.running_means) for callback in callbacks)
    judge = next((judge for judge in judges if judge is not None), None)
    return StepGuard(config.checks, progress, optimizer, callbacks, judge, runtime.say)


def build_run(config: RunConfig, runtime: Runtime, parts: Parts | None = None) -> TrainingRun:
    """Build data, model, gradient buffers and optimizer, then load the checkpoint if there is one. Collective.

    `parts` contains the callbacks and metrics of the run; if it is None, registered extensions provide both."""
    phases, state = runtime.phases, runtime.state
    replaced = step_parts(config)
    with phases("data"):
        data, plan = planned_data(config, runtime)
    with phases("inputs of extensions"):
        check_same_data(data.fingerprints, state.world)  # also waits for all ranks
        parts = parts or Parts().with_registered(config)
        for callback in parts.callbacks:
            callback.on_setup(runtime)
    with phases("model"):
        passes = PassContext(pair=(replaced.pair or PassPair)(), offload=build_store(config.parallel, runtime.device))
        stages = build_model(config, runtime, passes, plan, parts.callbacks)
    with phases("optimizer"):
        ddp = build_ddp(config, runtime, passes, stages)
        optimizer = build_optimizer(replaced.optimizer or DistributedOptimizer, config, runtime, ddp, parts.callbacks)
        scheduler = plan.schedule()
    with phases("checkpoint"):
        checkpoint = RunCheckpoint(config, state, stages, optimizer, plan, parts.callbacks)
        progress = load_start(checkpoint, runtime.say, data.fingerprint_at)
        if _is_elsewhere(plan, progress):
            config = _counted_from(progress, config, runtime)
            data.close()
            data, plan = planned_data(config, runtime)
            checkpoint = replace(checkpoint, config=config, plan=plan)
        lines = log_lines(config, plan, parts)
        saver = RunSaver(checkpoint, runtime, progress, lines)
    pipeline = (replaced.pipeline or Pipeline)(config, runtime, stages, passes)
    meters = meters_of_trunk(config, runtime, stages, parts)
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
        guard=build_guard(config, progress, optimizer, parts.callbacks, runtime),
        passed_over=set(config.checks.iterations_to_skip or ()),
        first_iteration=progress.iteration,
        callbacks=parts.callbacks,
        meters=meters,
        say=runtime.say,
    )
    pipeline.executor.timed = run.timers
    run.step = (replaced.step or TrainStep)(run)
    for callback in parts.callbacks:
        meters.extend(callback.meters(run))
    return run
