"""Micro-batches, schedule and length of a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.passes import pipeline_lists, post_validated
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulator import StageCosts, simulate
from megatron.core.pipeline_parallel.stages import pipeline_layout, stage_costs, tied_stages
from megatron.training.config.description import batch_line, microbatches_of
from megatron.training.config.run_config import RunConfig
from megatron.training.plan import RunPlan

if TYPE_CHECKING:
    from megatron.extensions.planner.fake_stage import MicroBatch


def micro_batch_of(config: RunConfig) -> MicroBatch:
    """What a rank holds of a micro-batch of this run."""
    from megatron.extensions.planner.fake_stage import MicroBatch

    device = "cpu" if config.parallel.cpu else "cuda"
    return MicroBatch(
        config.model,
        config.parallel,
        config.training.micro_batch_size,
        device,
        config.restarts_positions,
        config.optimizer.gradients_dtype == "bfloat16",
    )


def _pipeline_line(config: RunConfig, microbatches: int) -> str:
    """The schedule, and the share of a step that ranks are idle if times follow FLOPs and messages take none: up to the
    gradient norm, for which all wait without --optimizer-post-validation."""
    parallel, layout = config.parallel, pipeline_layout(config.model, config.parallel)
    costs = stage_costs(config.model, parallel)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    in_turns = parallel.overlap_moe_expert_parallel_comm
    times = StageCosts(forward=costs, input_grad=costs, weight_grad=costs)
    ahead = config.optimizer.optimizer_post_validation
    shape = parallel.schedule, layout.pp, microbatches, layout.chunks
    if ahead:
        tied = bool(tied_stages(config.model, layout))
        _, bubble = post_validated(pipeline_lists(*shape, False, group, in_turns, True), times, tied)
    else:
        bubble = simulate(build_schedule(*shape, group, in_turns), times).bubble
    where = f"{layout.num_stages} stages, {layout.chunks} on each rank" if layout.chunks > 1 else f"{layout.pp} stages"
    unless = " that is neither clipped nor skipped" if ahead else ""
    return f"pipeline {parallel.schedule}: {where}; bubble {bubble:.1%} of a step{unless}, by the FLOPs of the stages"


def batch_lines(plan: RunPlan, dims: ParallelDims) -> Iterator[str]:
    """Micro-batches, tokens a step, iterations, tokens and FLOPs of the run."""
    config, sizes = plan.base, plan.sizes
    for phase in plan.phases:
        where = f"phase {phase.name}: " if len(plan.phases) > 1 else ""
        yield f"{where}global batch {batch_line(phase.config, dims)}"
    if config.training.batch_size_varies:
        first, (end, _) = sizes.earlier[0][1], sizes.earlier[-1]
        yield f"batch size from {first} to {sizes.final} in {len(sizes.earlier)} steps over {end:,} samples"
    if dims.pp > 1:
        yield _pipeline_line(config, microbatches_of(plan.longest.config, dims))
    if plan.phases[-1].end is None:
        yield "length: one epoch of the training data"
        return
    from megatron.extensions.planner.flops import model_flops

    iterations = plan.iterations
    consumed = sizes.samples(iterations)
    tokens = plan.tokens(consumed)
    ends = [*(phase.first_token for phase in plan.phases[1:]), tokens]
    flops = sum(
        model_flops(phase.config.model).total * (end - phase.first_token)
        for phase, end in zip(plan.phases, ends, strict=True)
    )
    yield f"{iterations:,} iterations, {consumed:,} samples, {tokens:,} tokens, {flops:.6g} FLOPs in all"
