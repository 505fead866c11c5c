"""Builds the parts of a run from its configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron.core.attention.backend_choice import AttentionShape, choose_kernel
from megatron.core.attention.partition import rank_spans
from megatron.core.batch_overlap import BatchOverlap
from megatron.core.dist_checkpointing.shared_folder import check_shared
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.fp8.delayed_scaling import DelayedScaling
from megatron.core.fp8.recipes import WeightCasts
from megatron.core.fp8.weight_grad_choice import choose_kernels as choose_weight_grad_kernels
from megatron.core.init import initialize_parameters_
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_groups import freeze_parameters
from megatron.core.parts import OPTIMIZERS
from megatron.core.pipeline_parallel.stages import pipeline_layout, pipeline_stages, tied_stages
from megatron.core.tensor_parallel.residual_choice import choose_additions, keep_additions_in_norms, place_of
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.core.transformer.activation_store import build_store
from megatron.training.checkpointing import Checkpointer, load_start
from megatron.training.checks.step_guard import StepGuard
from megatron.training.config.run_config import RunConfig
from megatron.training.data import build_data, check_same_data
from megatron.training.forward_backward import ForwardBackward
from megatron.training.hooks import Meter, Parts
from megatron.training.initialize import Runtime, choose_products
from megatron.training.metrics.expert_load import ExpertLoad
from megatron.training.metrics.fp8_scales import FP8Scales
from megatron.training.metrics.model_sums import ModelSums
from megatron.training.metrics.multi_token_losses import MultiTokenLosses
from megatron.training.metrics.sample_log import SampleLog
from megatron.training.metrics.source_losses import SourceLosses
from megatron.training.metrics.summary import PeakMemory
from megatron.training.metrics.user_metrics import UserMetrics
from megatron.training.pipeline import Pipeline
from megatron.training.plan import plan_of, read_history
from megatron.training.progress import StepTimers
from megatron.training.run import TrainingRun
from megatron.training.saving import RunSaver


def build_stages(
    config: RunConfig,
    runtime: Runtime,
    queue: WeightGradQueue,
    casts: WeightCasts,
    overlap: BatchOverlap,
    attention_backend: str = "auto",
) -> dict[int, GPTModel]:
    """Builds this rank's pipeline stages. Initial weights do not depend on the layout."""
    state, model = runtime.state, config.model
    layout = pipeline_layout(model, config.parallel)
    holds = pipeline_stages(model, config.parallel)
    stages: dict[int, GPTModel] = {}
    offload = build_store(config.parallel, runtime.device)
    for stage in layout.stages_of(state.pp.rank):
        stages[stage] = GPTModel(
            model,
            replace(config.parallel, attention_backend=attention_backend),
            state,
            **vars(holds[stage]),
            tied_stages=tied_stages(model, layout),
            embedding=stages[0].embedding if 0 in stages else None,
            queue=queue,
            casts=casts,
            overlap=overlap,
            offload=offload,
            device=runtime.device,
            seed=config.training.seed,
            init_threads=host_threads(runtime.device),
            lazy=config.ddp.shards_parameters,
        )
    return stages


def host_threads(device: torch.device) -> int:
    """Threads that draw initial weights and update states in host memory: the cores that each GPU of this node has, or
    torch's threads on CPU."""
    if device.type != "cuda":
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))


def attention_shape(config: RunConfig, cp_rank: int = 0) -> AttentionShape | None:
    """Shape of this rank's attention, if kernels may be compared at it; None if plain torch computes it, or in 32 bits,
    or if nothing may depend on timings because the run is deterministic and there is no dropout."""
    model, parallel, dtype = config.model, config.parallel, getattr(torch, config.parallel.params_dtype)
    deterministic = config.training.deterministic and parallel.attention_backend == "auto"
    in_torch = model.alibi or model.attn_logit_softcapping is not None
    if in_torch or dtype.itemsize != 2 or (deterministic and not model.attention_dropout):
        return None
    length, cp = model.seq_length, parallel.context_parallel_size
    some_full = any(not kind.span.hides(length) for kind in model.layers)
    window = None if some_full else max(kind.span.window or kind.span.chunk or length for kind in model.layers)
    documents = config.data.reset_attention_mask
    by_heads = cp > 1 and parallel.cp_comm_type == "a2a"
    parts = parallel.tensor_model_parallel_size * (cp if by_heads else 1)
    return AttentionShape(
        length,
        config.training.micro_batch_size,
        model.num_attention_heads // parts,
        model.query_groups // parts,
        model.head_dim,
        model.value_head_dim,
        dtype,
        queries=rank_spans(length, cp_rank, cp) if cp > 1 and not by_heads else None,
        window=window,
        tiles=cp > 1 or documents or window is not None or model.attends_in_tiles,
        documents=documents,
        dropout=model.attention_dropout,
        untimed=config.training.deterministic,
    )


def choose_attention(config: RunConfig, runtime: Runtime) -> str:
    """The attention kernel of all ranks, as `ModelParallelConfig.attention_backend`. Collective.

    One that does not compute this attention is not taken, as a notice has said. Raises ValueError if it could be taken
    and does not run here.
    """
    asked = config.parallel.attention_backend
    if runtime.device.type != "cuda":
        return asked if asked in ("flash", "unfused") else "auto"
    shape = attention_shape(config, runtime.state.cp.rank)
    if asked == "unfused" or shape is None:
        return asked if asked in ("flash", "unfused") else "auto"
    asked = asked if asked in shape.backends else "auto"
    choice = choose_kernel(shape, runtime.device, runtime.state.world, None if asked == "auto" else asked)
    runtime.say(f" {choice}{'' if asked == 'auto' else ', as --attention-backend says'}")
    # Evaluation has no dropout: torch's default computes it.
    return "auto" if choice.winner in (None, "unfused") else choice.winner


def multiplied_dtypes(config: RunConfig) -> list[torch.dtype]:
    """The dtypes of matrix products: that of the layers, and those in which the optimizer multiplies."""
    params_dtype, main_dtype = (
        getattr(torch, name) for name in (config.parallel.params_dtype, config.parallel.main_dtype)
    )
    of_updates = getattr(OPTIMIZERS[config.optimizer.optimizer], "update_dtypes", lambda config, main_dtype: ())
    return list(dict.fromkeys([params_dtype, *of_updates(config.optimizer, main_dtype)]))


def choose_gemms(config: RunConfig, runtime: Runtime, stages: Mapping[int, GPTModel]) -> None:
    """Chooses the kernels of fp8 weight gradients, and where the residual stream is added to, on GPUs. Where nothing
    may depend on timings the next norm adds to it. Collective over the ranks of a pipeline stage."""
    parallel = config.parallel
    if runtime.device.type != "cuda":
        return
    if config.training.deterministic:
        keep_additions_in_norms(stages.values())
        return
    tokens = config.training.micro_batch_size * config.model.seq_length // parallel.context_parallel_size
    stage, device = runtime.state.axis("stage"), runtime.device
    for residual, choice in choose_additions(stages.values(), tokens, stage, device).items():
        runtime.say(f" residual addition after {residual}: in the {place_of(choice)} ({choice.times})")
    if parallel.fp8_format is None:
        return
    found = choose_weight_grad_kernels(stages.values(), tokens, parallel.fp8_recipe, stage, device)
    for shape, choice in found.items():
        name = f"{shape.outputs} x {shape.inputs}"
        runtime.say(f" kernel of fp8 weight gradients {name}: {choice.winner or 'torch'} ({choice.times})")


def build_run(config: RunConfig, runtime: Runtime, parts: Parts | None = None) -> TrainingRun:
    """Builds data, model, gradient buffers and optimizer, then loads the checkpoint if there is one. Collective."""
    phases, state = runtime.phases, runtime.state
    queue, casts, overlap = WeightGradQueue(), WeightCasts(), BatchOverlap()
    with phases("data"):
        plan = plan_of(config).continued(read_history(config.checkpoint))
        data, plan = build_data(plan, runtime)
    with phases("inputs of extensions"):
        check_same_data(data.fingerprints, state.world)  # once all ranks have come here
        parts = (parts or Parts()).with_registered(config)
        for callback in parts.callbacks:
            callback.on_setup(runtime)
    with phases("model"):
        for line in choose_products(multiplied_dtypes(config), runtime.device, state.world):
            runtime.say(f" {line}")
        attention = choose_attention(plan.longest.config, runtime)
        stages = build_stages(config, runtime, queue, casts, overlap, attention)
        for line in freeze_parameters(stages.values(), config.optimizer, state.world):
            runtime.say(f" {line}")
        choose_gemms(plan.longest.config, runtime, stages)
        scaling = DelayedScaling(config.parallel, stages.values(), state.axis("stage"))
    with phases("optimizer"):
        ddp = DistributedDataParallel(
            config.ddp,
            config.parallel,
            state,
            list(stages.values()),
            config.optimizer.use_distributed_optimizer,
            config.optimizer.group_of,
            config.optimizer.whole_roles,
            queue,
            casts,
            getattr(torch, config.optimizer.gradients_dtype or "", None),
            partial(
                initialize_parameters_,
                seed=config.training.seed,
                coords=state.coords,
                threads=host_threads(runtime.device),
            ),
        )
        optimizer = DistributedOptimizer(config.optimizer, ddp, state, host_threads(runtime.device))
        scheduler = plan.schedule()
    with phases("checkpoint"):
        if config.checkpoint.save and not config.training.skip_train:
            check_shared(Path(config.checkpoint.save), "--save", state.world)
        checkpointer = Checkpointer(config, state, stages, optimizer, plan, parts.callbacks)
        progress = load_start(checkpointer, runtime.say, data.fingerprint_at)
        scaling.refresh()
        saver = RunSaver(checkpointer, runtime, progress)
    if config.logging.sample_log:
        path = Path(config.logging.sample_log)
        data.sample_log = SampleLog(path, data.train.dataset, state, progress.iteration)
    pipeline = Pipeline(config, runtime, stages, queue, casts, overlap)
    timers = pipeline.executor.timed = StepTimers()
    pipeline.executor.validate = optimizer.validate
    meters: list[Meter] = [
        ExpertLoad(config.model, state, stages, runtime.device),
        MultiTokenLosses(config.model, state, stages, runtime.device),
        SourceLosses(data.logged_sources, state, stages, runtime.device),
        FP8Scales(scaling),
        ModelSums(config.logging, optimizer, stages, state, runtime.device),
        UserMetrics(parts.metrics, runtime.device),
        PeakMemory(state.world, runtime.device),
    ]
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
        guard=StepGuard(config.checks, runtime.device, progress),
        timers=timers,
        first_iteration=progress.iteration,
        callbacks=parts.callbacks,
        meters=meters,
        say=runtime.say,
    )
    for callback in parts.callbacks:
        meters.extend(callback.meters(run))
    plan.enter(run)
    return run
