"""Rules for pipeline stages, recomputation, communication overlap and sharded optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.losses import AUTO, LOSSES
from megatron.core.config.model_fields import RECOMPUTED_PARTS
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.training.config.problem import Problem, nearest_divisor, problems_of
from megatron.training.config.run_config import RunConfig

VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"


def pipeline(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p, layers = c.parallel, c.model.num_layers
    pp = p.pipeline_model_parallel_size
    chunks = p.num_virtual_stages_per_pipeline_rank
    per_stage = p.num_layers_per_virtual_pipeline_stage
    if layers < 1 or pp < 1 or (chunks is not None and chunks < 1) or (per_stage is not None and per_stage < 1):
        return
    if chunks is not None and per_stage is not None:
        return  # rules in `fields.py` report that these flags conflict
    if per_stage is not None and per_stage * pp > layers:
        rule = f"must be at most --num-layers {layers} / --pipeline-model-parallel-size {pp}"
        near = f"nearest: {layers // pp}" if layers >= pp else "remove it"
        yield Problem(PER_STAGE, per_stage, rule, near)
        return
    try:
        layout = pipeline_layout(c.model, p)
    except ValueError as error:
        if chunks is None and per_stage is None and p.stage_split is not None:
            return  # the rules for uneven stages report the error
        if per_stage is None:
            yield Problem.of_message(VIRTUAL, chunks, str(error))
        else:
            made = -(-layers // (per_stage * pp))
            rule = f"makes {made} stage{'s' if made > 1 else ''} per rank, which" + rule_of(str(error))
            yield Problem(PER_STAGE, per_stage, rule, "remove it, or use --pipeline-schedule interleaved")
        return
    if p.stage_split is None or p.stage_split.num_stages(c.model, p) is None:
        yield from _enough_layers(layout, layers)
    yield from _own_schedule(c, layout)
    if (rules := PIPELINE_SCHEDULES.facts(p.schedule).rules) is not None:
        yield from problems_of(rules(c, world_size))
    yield from _groups(p, layout)


def _groups(p: ModelParallelConfig, layout: PipelineLayout) -> Iterator[Problem]:
    group = p.microbatch_group_size_per_virtual_pipeline_stage
    if group is None:
        return
    if layout.chunks == 1 or not PIPELINE_SCHEDULES.facts(p.schedule).any_groups:
        yield Problem.no_effect(GROUP, group, "several stages per rank and --pipeline-schedule interleaved")
    elif group < layout.pp:
        least = f"must be at least --pipeline-model-parallel-size {layout.pp}"
        rule = f"{least}: with smaller groups, stages would wait for each other"
        yield Problem(GROUP, group, rule, f"nearest: {layout.pp}")


def _own_schedule(c: RunConfig, layout: PipelineLayout) -> Iterator[Problem]:
    """Check that the pipeline schedule supports the given numbers of ranks, stages and micro-batches."""
    schedule, microbatches = c.parallel.schedule, c.training.num_microbatches
    if not microbatches or PIPELINE_SCHEDULES.facts(schedule).always_legal:
        return
    try:
        pipeline_lists(schedule, layout.pp, microbatches, layout.chunks)
    except ValueError as error:
        yield Problem.of_message("--pipeline-schedule", schedule, str(error))


def rule_of(message: str) -> str:
    """Extract the rule from a message of the form `--flag value: rule; remedy`."""
    return message.partition(":")[2].partition(";")[0]


def _enough_layers(layout: PipelineLayout, layers: int) -> Iterator[Problem]:
    """Check that every stage contains at least a layer, the embedding or the output head."""
    if layout.num_stages <= layers + 2:
        return
    filled = layers + 2
    rule = f"{layers} layers, the embedding and the head fill at most {filled} stages"
    chunks, most = filled // layout.pp, filled // layout.chunks
    fewer_ranks = layout.chunks == 1 or chunks == 0 or layout.v_shaped
    if fewer_ranks:
        near = _divisor(layout.pp, most or filled)
        stages = f", {layout.chunks} per rank" if layout.chunks > 1 else ""
        yield Problem("--pipeline-model-parallel-size", layout.pp, rule + stages, f"nearest: {near}")
        chunks = filled // near
    if most == 0 or not fewer_ranks:
        yield Problem(VIRTUAL, layout.chunks, f"{rule}, on {layout.pp} ranks", f"nearest: {chunks}")


def _divisor(size: int, most: int) -> int:
    """Return the largest divisor of `size` that is at most `most`. Because `size` divides the world size, every divisor
    of `size` also divides the world size."""
    return next(n for n in range(most, 0, -1) if size % n == 0)


def recomputation(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Report each module named in --recompute-modules that the model does not contain, or that is part of a larger
    recomputed module."""
    m, flag = c.model, "--recompute-modules"
    named = m.recompute_modules or ()
    try:
        dense = bool(m.dense_layers)
    except ValueError:
        dense = True  # another rule reports the invalid pattern
    for part in named if m.recompute_granularity == "selective" else ():
        within = RECOMPUTED_PARTS.within(part)
        if not m.has_recomputed(part):
            yield Problem.no_effect(flag, part, RECOMPUTED_PARTS.needs(part))
        elif part in ("mlp", "mlp_act") and not dense:
            use = f"use {part.replace('mlp', 'moe')}, or " if m.num_experts is not None else ""
            rule = "has no effect, because no layer has an MLP without experts"
            yield Problem(flag, part, rule, f"{use}remove {part}", harmless=True)
        elif within in named:
            rule = f"has no effect with {within}, which includes it"
            yield Problem(flag, part, rule, "keep one", harmless=True)


def loss_chunks(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check --loss-chunk-tokens. With this flag, the forward pass computes the output layer, the loss and their
    gradients in chunks of tokens."""
    name = "--loss-chunk-tokens"
    size, loss = c.parallel.loss_chunk_tokens, c.model.loss_func
    if not size:
        return
    if loss in LOSSES and not LOSSES.facts(loss).multi_token:
        rule = f"needs a loss that can process some tokens at a time, which --loss-func {loss} does not declare"
        remedy = "remove it, or register the loss with multi_token=True if it needs only logits and label"
        yield Problem(name, "auto" if size == AUTO else size, rule, remedy)


def overlap(c: RunConfig, world_size: int) -> Iterator[Problem]:
    if c.ddp.overlap_param_gather and not c.optimizer.use_distributed_optimizer:
        why = "every rank updates whole parameters, so there is nothing to gather"
        flag, other = unsharded_by(c)
        rule, remedy = f"cannot be combined with {flag}: {why}", f"add --no-overlap-param-gather, or {other}"
        yield Problem("--overlap-param-gather", None, rule, remedy)


def sharding(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that --data-parallel-sharding-strategy is compatible with the optimizer and overlap flags."""
    flag, strategy = "--data-parallel-sharding-strategy", c.ddp.data_parallel_sharding_strategy
    given = f"{flag} {strategy}"
    if strategy not in (None, "no_shard") and not c.optimizer.use_distributed_optimizer:
        why = "the strategy shards the optimizer state"
        yield Problem.exclusive(flag, strategy, "--no-use-distributed-optimizer", why)
    yield from _instances(c, world_size)
    if not c.ddp.shards_gradients:
        return
    if c.ddp.overlap_grad_reduce:
        rule = f"has no effect with {given}, which always reduces gradients during the backward pass"
        yield Problem("--overlap-grad-reduce", None, rule, "remove it", harmless=True)
    if c.ddp.overlap_param_gather and c.ddp.shards_parameters:
        rule = f"has no effect with {given}, which always gathers parameters during the passes"
        yield Problem("--overlap-param-gather", None, rule, "remove it", harmless=True)


def _instances(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p = c.parallel
    name = "--num-distributed-optimizer-instances"
    count = c.parallel.num_distributed_optimizer_instances
    if count == 1:
        return
    if not c.optimizer.use_distributed_optimizer:
        flag, other = unsharded_by(c)
        rule, remedy = f"cannot be combined with {flag}: nothing is sharded", f"remove {name}, or {other}"
        yield Problem(name, count, rule, remedy)
    if c.optimizer.updates_together:
        why = "ranks of all instances update matrices and compute sums together"
        yield Problem.exclusive(name, count, f"--optimizer {c.optimizer.optimizer}", why)
    try:
        dims = ParallelDims.from_config(p, world_size)
    except (ValueError, ZeroDivisionError):
        return  # another rule reports the invalid layout
    sizes = [("DP * CP", dims.dp * dims.cp)]
    if c.model.num_experts is not None:
        sizes.append(("the data-parallel size of experts", dims.expt_dp))
    for what, size in sizes:
        if size < 1:
            continue  # another rule reports the invalid layout
        if count < 1 or size % count:
            yield Problem(name, count, f"must divide {what} = {size}", f"nearest: {nearest_divisor(size, count)}")


def unsharded_by(c: RunConfig) -> tuple[str, str]:
    """Return the flag by which the user turned the distributed optimizer off, and a remedy that turns it on."""
    if c.ddp.data_parallel_sharding_strategy == "no_shard":
        flag = "--data-parallel-sharding-strategy"
        return f"{flag} no_shard", f"use {flag} optim"
    return "--no-use-distributed-optimizer", "remove --no-use-distributed-optimizer"
