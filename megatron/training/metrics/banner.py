"""Lines that a run prints once at its start, about the model, layout, precision, batch, length and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.core.pipeline_parallel.stage_parameters import active_parameters, count_parameters
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.training.config.batch_size import batch_line, byte_text, formats_of_states, shape_line
from megatron.training.metrics.sinks import metrics_file
from megatron.training.run import TrainingRun


def banner(run: TrainingRun) -> Iterator[str]:
    """Yield one line for each of these topics: model, layout, precision, batch, length and memory."""
    config = run.config
    dims = run.runtime.state.dims
    device = run.runtime.device
    model, tokens = config.model, run.plan.tokens(run.batch_sizes.samples(run.train_iters))
    count = count_parameters(model).total
    active = f", active per token {active_parameters(model):,}" if model.num_experts is not None else ""
    yield f"model: {shape_line(model)}; {count:,} parameters{active}"
    yield f"layout: {', '.join(_layout(run))}"
    yield f"precision: {formats_of_states(config)}{_format(run)}"
    yield f"batch: {batch_line(config, dims)}"
    if not config.training.skip_train:
        left = max(0, run.train_iters - run.progress.iteration)
        begun = f", {left:,} of them remaining" if run.progress.iteration else ""
        yield (
            f"length: {run.train_iters:,} iterations{begun}, {run.batch_sizes.samples(run.train_iters):,} samples, "
            f"{tokens:,} tokens, {tokens / count:.3g} for each parameter"
        )
    of = ""
    if device.type == "cuda":
        of = f", of {byte_text(torch.cuda.get_device_properties(device).total_memory)} on the device"
    yield f"memory: weights, gradients and optimizer take {byte_text(_state_bytes(run))} on this rank{of}"
    base = run.plan.base
    named = base.logging.metrics_file or base.checkpoint.save_root
    where = "" if named else f" in the current folder, {Path.cwd()}; --save or --metrics-file changes the folder"
    yield f"metrics: {metrics_file(base)}{where}"


def _state_bytes(run: TrainingRun) -> int:
    """Return the number of bytes that this rank's weights, including frozen weights, gradients and optimizer states
    occupy on the device."""
    frozen = {p for stage in run.stages.values() for p in stage.parameters() if not p.requires_grad}
    parameters, gradients, _ = run.ddp.nbytes
    return sum(p.nbytes for p in frozen) + parameters + gradients + run.optimizer.nbytes[0]


def _layout(run: TrainingRun) -> Iterator[str]:
    """Describe each parallelism axis larger than 1."""
    parallel, dims = run.config.parallel, run.runtime.state.dims
    ranks = run.runtime.launch.world_size
    yield f"{ranks} rank{'s' if ranks > 1 else ''}"
    for name, axis in (("TP", "tp"), ("CP", "cp"), ("PP", "pp"), ("EP", "ep"), ("DP", "dp")):
        if dims.size(axis) > 1:
            yield f"{name} {dims.size(axis)}"
    if parallel.sequence_parallel:
        yield "sequence parallel"
    if dims.pp > 1:
        stages = pipeline_layout(run.config.model, parallel).num_stages
        yield f"schedule {parallel.schedule} of {stages} stages"
    if dims.dp > 1:
        yield f"sharded: {run.config.ddp.data_parallel_sharding_strategy}"


def _format(run: TrainingRun) -> str:
    name = linear_format(run.config.parallel)
    return "" if name is None else f", {LINEAR_FORMATS.facts(name).described(run.config.parallel)}"
