"""Prints the plan of a run without starting it: no GPU and no process group. torch is imported only to measure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.config.model import TransformerConfig
from megatron.core.config.param_groups import lines_of_groups
from megatron.core.distributed.param_layout import DTYPE_BYTES
from megatron.core.models.gpt.parameters import MULTI_TOKEN
from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulator import StageCosts, simulate
from megatron.core.pipeline_parallel.stages import Stage, pipeline_layout, stage_costs
from megatron.planner.memory import RankStates, states_of_rank
from megatron.planner.parameters import active_parameters, count_parameters
from megatron.training.config.batch_size import BatchSizes, num_microbatches
from megatron.training.config.flags import flat_values
from megatron.training.config.run_config import RunConfig
from megatron.training.config.stages.plan import Stage as RunStage
from megatron.training.config.stages.plan import StagePlan, stage_plan
from megatron.training.config.stages.printed import stage_lines

if TYPE_CHECKING:
    from megatron.planner.activations import MicroBatch, RankActivations

GROUPS_SHOWN = 4
RANKS_SHOWN = 8


def print_plan(config: RunConfig, world_size: int, plan_file: str | None = None) -> None:
    """Prints what a resolved and validated configuration will build and do on `world_size` ranks.

    Writes the same to `plan_file` as JSON: "world_size", "config" with every field by its flat name, and the lines of
    the "plan" under their titles. Raises OSError if it cannot be written.
    """
    dims = ParallelDims.from_config(config.parallel, world_size)
    stages = stage_plan(config)
    largest = stages.longest.config
    of = f" in stage {stages.longest.name}, the largest" if len(stages.stages) > 1 else ""
    plan: dict[str, list[str]] = {}
    for title, lines in (
        ("Model", model_lines(config)),
        (f"Groups, world size {world_size}", group_lines(dims)),
        (f"Pipeline stages and memory of each rank{of}", memory_lines(largest, dims)),
        ("Batch and length", batch_lines(stages, dims)),
        ("Data", [line for stage in stages.stages for line in data_lines(stages, stage)]),
    ):
        print(title)
        plan[title] = []
        for line in lines:
            print(f"  {line}")
            plan[title].append(line)
    if plan_file is not None:
        record = {"world_size": world_size, "config": flat_values(config), "plan": plan}
        Path(plan_file).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def data_lines(stages: StagePlan, stage: RunStage) -> Iterator[str]:
    """The data sets of the training split in a stage as they are on this machine."""
    from megatron.core.datasets.sources import source_lines

    config, data = stage.config, stage.config.data
    yield from stage_lines(stages, stage)
    if data.dataset != "gpt":
        yield "synthetic" if data.dataset == "mock" else f"--dataset-type {data.dataset}"
        return
    samples = None
    if stage.end is not None:
        end = stages.sizes.samples(stages.iterations) if stage == stages.stages[-1] else stage.end
        samples = end - stage.first_sample
    yield from source_lines(data, samples, config.model.seq_length, _text_line)


def _text_line(path: str) -> str | None:
    """What is said of text files, which have no tokens yet; None for an indexed dataset."""
    from megatron.core.text_files.inputs import find_inputs
    from megatron.core.text_files.tokenized import is_text

    if not is_text(path):
        return None
    try:
        files = find_inputs([path], "--data-path")
    except ValueError as error:
        return str(error)
    size = sum(file.size for file in files)
    return f"{path}: text, {len(files)} files, {size / 1e6:,.1f} MB, tokenized when the run starts"


def model_lines(config: RunConfig) -> Iterator[str]:
    """Shape, parameters and FLOPs of the model."""
    from megatron.planner.flops import model_flops, orthogonalization_flops

    m = config.model
    yield shape_line(m)
    attention = _local_attention(m) + _sinks(m)
    yield f"sequence length {m.seq_length}, positions {_positions(m)}{attention}, {m.normalization}"
    if any(m.linear_pattern):
        keys, values = f"{m.linear_num_key_heads} key heads of {m.linear_key_head_dim}", m.linear_num_value_heads
        linear = f"{sum(m.linear_pattern)} layers with {m.experimental_attention_variant}"
        yield f"{linear}, {keys}, {values} value heads of {m.linear_value_head_dim}"
    tied = "tied to" if m.tied_embeddings else "not tied to"
    source = "" if config.tokenizer.tokenizer_type else " (no tokenizer is named)"
    yield f"vocabulary {m.vocab_size:,}{source}, padded to {m.padded_vocab_size:,}, {tied} the output layer"
    if m.num_experts is not None:
        yield _experts_line(m)
    if m.mtp_depths:
        share = f"their mean loss times {m.mtp_loss_scaling_factor:g}"
        yield f"multi-token prediction: {m.mtp_depths} modules of a layer like the last one each, {share}"
    count = count_parameters(m)
    active = f", of which a token meets {active_parameters(m):,}" if m.num_experts is not None else ""
    yield f"parameters {count.total:,}{active}"
    for part, number in vars(count).items():
        if number or part not in ("router", "experts", "other"):
            yield f"    {part.replace('_', ' '):<14}{number:>22,}"
    flops = model_flops(m)
    counted = "active parameters" if m.num_experts is not None else "parameters"
    yield (
        f"FLOPs per token {flops.total:.6g} forward and backward: {flops.matmul:.6g} matrix multiplications "
        f"(6 x {counted}), {flops.attention:.6g} attention (causal: half of the square), counted on fake tensors"
    )
    if update := orthogonalization_flops(m, config.optimizer):
        tokens = (config.training.global_batch_size or 1) * m.seq_length
        of_batch = update / (flops.total * tokens)
        yield f"FLOPs of Muon's iterations {update:.6g}, {of_batch:.2%} of those of a batch of {tokens:,} tokens"


def shape_line(m: TransformerConfig) -> str:
    """Layers, width, heads, MLP."""
    heads = f"{m.num_attention_heads} heads of {m.head_dim}"
    if m.latent:
        queries = f" for queries {m.q_lora_rank}," if m.q_lora_rank else ""
        heads += f", values of {m.v_head_dim}, latents{queries} for keys and values {m.kv_lora_rank}"
    elif m.query_groups != m.num_attention_heads:
        heads += f" in {m.query_groups} groups"
    if not m.latent and m.value_head_dim != m.head_dim:
        heads += f", values of {m.value_head_dim}"
    return f"{m.num_layers} layers, hidden size {m.hidden_size}, {heads}, MLP {_width(m)} ({m.activation})"


def _width(m: TransformerConfig) -> str:
    widths = {width for width, experts in zip(m.ffn_sizes, m.expert_pattern, strict=True) if not experts}
    return f"{min(widths)} to {max(widths)}" if len(widths) > 1 else str(m.ffn_size)


def _positions(m: TransformerConfig) -> str:
    rotated = sum(m.rope_pattern)
    where = "" if not m.rotary or rotated == m.num_layers else f" in {rotated or 'no'} layers"
    return m.position_embedding_type + where


def _local_attention(m: TransformerConfig) -> str:
    local = sum(m.local_pattern)
    kind = f"chunks of {m.attention_chunk_size}" if m.attention_chunk_size else f"window {m.window_size}"
    where = f" in {local} layers" if local < m.num_layers else ""
    own = dict(m.local_own)
    shown = [
        f"{own['num_attention_heads']} heads" if "num_attention_heads" in own else "",
        f"{own['num_query_groups']} groups" if "num_query_groups" in own else "",
        SINKS[own["softmax_type"]] or "no sinks" if "softmax_type" in own else "",
    ]
    heads = f" ({', '.join(filter(None, shown))})" if any(shown) else ""
    return f", {kind}{where}{heads}" if local else ""


SINKS = {"vanilla": "", "off-by-one": "attention sinks of 0", "learnable": "attention sinks"}


def _sinks(m: TransformerConfig) -> str:
    return f", {SINKS[m.softmax_type]}" if SINKS[m.softmax_type] else ""


def _experts_line(m: TransformerConfig) -> str:
    shared = m.moe_shared_expert_intermediate_size
    latent = f" behind latents of {m.moe_latent_size}" if m.moe_latent_size else ""
    beside = f" and a shared one of {shared}" if shared else ""
    groups = f" in {m.moe_router_group_topk} of {m.moe_router_num_groups} groups" if m.moe_router_group_topk else ""
    return (
        f"{m.num_experts} experts of {m.moe_ffn_size}{latent} in {len(m.moe_layers)} layers, each token to "
        f"{m.moe_router_topk} of them{groups}{beside}; {m.moe_router_scores} scores, balanced by "
        f"{m.moe_router_load_balancing_type}"
    )


def group_lines(dims: ParallelDims) -> Iterator[str]:
    """The groups along each axis that is cut."""
    axes = [("TP", "tp"), ("CP", "cp"), ("DP", "dp"), ("PP", "pp"), ("EP", "ep")]
    if dims.ep > 1 or dims.expt_tp != dims.tp:
        axes += [("ETP", "expt_tp"), ("EDP", "expt_dp")]  # tensor and data parallelism of the experts
    yield ", ".join(f"{name} {dims.size(axis)}" for name, axis in axes)
    for name, axis in axes:
        if dims.size(axis) > 1:
            groups = dims.groups(axis)
            shown = " ".join(_ranks(group) for group in groups[:GROUPS_SHOWN])
            more = f" ... {_ranks(groups[-1])}" if len(groups) > GROUPS_SHOWN else ""
            yield f"{name} {len(groups)} groups of {dims.size(axis)}: {shown}{more}"


def _ranks(group: tuple[int, ...]) -> str:
    """`[0,1]`, and for many ranks the first few and the last."""
    if len(group) <= RANKS_SHOWN:
        return "[" + ",".join(map(str, group)) + "]"
    return "[" + ",".join(map(str, group[:3])) + f",...,{group[-1]}]"


def memory_lines(config: RunConfig, dims: ParallelDims) -> Iterator[str]:
    """One line for each pipeline rank: what it holds, bytes of parameters, gradients and optimizer state, and of
    activations; then what is counted."""
    from megatron.planner.activations import activations_of_ranks

    plans = [
        states_of_rank(config.model, config.parallel, config.optimizer, config.ddp, dims, rank)
        for rank in range(dims.pp)
    ]
    batch = micro_batch_of(config)
    activations = activations_of_ranks(batch, microbatches_of(config, dims))
    titles = ["weights", "gradients", "optimizer", "activations", "working", "total"]
    offloads = any(plan.memory.host for plan in plans) or any(held.host for held in activations)
    yield "{:<4}{:<44}{:>18}{:>16}".format("pp", "holds", "stage parameters", "rank parameters") + "".join(
        f"{title:>12}" for title in ([*titles, "host"] if offloads else titles)
    )
    for plan, held in zip(plans, activations, strict=True):
        memory = plan.memory
        optimizer, working = memory.main_parameters + memory.moments, come_and_go(plan, held, config)
        sizes = (memory.parameters, memory.gradients, optimizer, held.peak, working)
        stage = sum(meta.numel for meta in plan.metas)
        every = [*sizes, sum(sizes), memory.host + held.host] if offloads else [*sizes, sum(sizes)]
        shown = "".join(f"{byte_text(size):>12}" for size in every)
        yield f"{plan.pp_rank:<4}{_holdings(plan):<44}{stage:>18,}{plan.parameters:>16,}{shown}"
    owned = "on every rank"
    if config.optimizer.use_distributed_optimizer:
        experts = f" (of experts over {dims.shards(True)})" if config.model.num_experts is not None else ""
        copies = f", in {dims.instances} instances" if dims.instances > 1 else ""
        owned = f"sharded over {dims.shards(False)} ranks{experts}{copies}"
    yield f"states: {formats_of_states(config)} {owned}; padding of buffers included"
    if offloads:
        most_host = max((plan.memory for plan in plans), key=lambda memory: memory.host)
        yield (
            f"{config.optimizer.host_fraction:g} of optimizer states in host memory, not in the total: at most "
            f"{most_host.host_states:,} bytes of states, {most_host.host_slots:,} that gradients and parameters pass "
            "through"
        )
    if config.ddp.shards_gradients:
        what = "gradients and parameters" if config.ddp.shards_parameters else "gradients"
        flying = max((plan.in_flight for plan in plans), key=lambda units: units.total)
        yield (
            f"matrices' {what} sharded too; whole units count as working: at most {flying.parameters:,} bytes of "
            f"parameters, {flying.gradients:,} of gradients"
        )
    if config.optimizer.has_own_groups:
        trained = {meta.name: meta for plan in plans for meta in plan.metas if not config.optimizer.freezes(meta.name)}
        groups = {name: (config.optimizer.group_of(name, meta.kind), meta.numel) for name, meta in trained.items()}
        yield from lines_of_groups(groups)
    yield from _activation_lines(batch, activations)
    working_bytes = [come_and_go(plan, held, config) for plan, held in zip(plans, activations, strict=True)]
    most = max(plans, key=lambda p: p.memory.total + activations[p.pp_rank].peak + working_bytes[p.pp_rank])
    held, states = activations[most.pp_rank], most.memory.total
    yield (
        f"most on pp {most.pp_rank}: {states:,} bytes of states, {held.peak:,} of activations, "
        f"{working_bytes[most.pp_rank]:,} of working memory"
    )


def come_and_go(plan: RankStates, held: RankActivations, config: RunConfig) -> int:
    """Bytes that come and go: temporary tensors, whole units, and copies of weights in fp8, of whole units alone where
    parameters are sharded."""
    copies = held.weight_copies
    if config.ddp.shards_parameters and plan.in_flight.parameters:
        whole = plan.parameters * DTYPE_BYTES[config.parallel.params_dtype]
        copies = copies * plan.in_flight.parameters // max(whole, plan.in_flight.parameters)
    return held.working + copies + plan.in_flight.total


def formats_of_states(config: RunConfig) -> str:
    """Number formats of parameters, gradients and optimizer states."""
    params, main, optimizer = config.parallel.params_dtype, config.parallel.main_dtype, config.optimizer
    state = f"{optimizer.optimizer} state {main}"
    if optimizer.use_precision_aware_optimizer:
        kind = optimizer.main_kind(params, main)
        state = f"main parameters {kind}, exp_avg {optimizer.exp_avg_dtype}, exp_avg_sq {optimizer.exp_avg_sq_dtype}"
    return f"parameters {params}, gradients {'bfloat16' if optimizer.main_grads_dtype == 'bf16' else main}, {state}"


def micro_batch_of(config: RunConfig) -> MicroBatch:
    """What a rank holds of a micro-batch of this run."""
    from megatron.planner.fake_stage import MicroBatch

    device = "cpu" if config.parallel.cpu else "cuda"
    return MicroBatch(
        config.model,
        config.parallel,
        config.training.micro_batch_size,
        device,
        config.restarts_positions,
        config.optimizer.main_grads_dtype == "bf16",
    )


def microbatches_of(config: RunConfig, dims: ParallelDims) -> int:
    sizes = BatchSizes.from_config(config)
    return num_microbatches(sizes.final, config.training.micro_batch_size, dims.dp)


def _activation_lines(batch: MicroBatch, ranks: Sequence[RankActivations]) -> Iterator[str]:
    """What is counted as activations, and how much of it a layer has."""
    model = batch.model
    even = ", tokens even over the experts" if model.num_experts is not None else ""
    kernels = "" if batch.device == "cpu" else ", norms as GPUs compute them (not yet compared with a GPU)"
    yield (
        f"activations: saved for backward, measured on fake tensors by the kernels of CPUs{kernels}{even}; "
        "logits of the loss included, tokens and labels not"
    )
    again = model.recompute_granularity or "none"
    if model.recomputed_modules:
        again += f" ({', '.join(model.recomputed_modules)})"
    flight = "; ".join(
        f"pp {rank} " + " + ".join(f"{n} of chunk {c}" if len(held.in_flight) > 1 else str(n) for c, n in numbered)
        for rank, held in enumerate(ranks[:RANKS_SHOWN])
        for numbered in [list(enumerate(held.in_flight))]
    )
    first = ranks[0].stages[0]
    kept = f"of a micro-batch of {batch.samples} the first stage keeps {first.kept:,} bytes, recomputation {again}"
    if offloaded := batch.parallel.offloaded_layers:
        kept += f"; {first.offloaded:,} of {offloaded} layers are offloaded"
    yield kept
    if offloaded:
        yield "on host: pinned buffers of offloaded activations, powers of two; at most two layers' are on the device"
    yield f"micro-batches in flight at the peak: {flight}{' ...' if len(ranks) > RANKS_SHOWN else ''}"
    yield from _fp8_line(batch)
    yield "working: gradients and temporary tensors at the highest point of a step, measured in the same way"


def _fp8_line(batch: MicroBatch) -> Iterator[str]:
    parallel, layers = batch.parallel, batch.parallel.fp8_layers(batch.model.num_layers)
    if layers:
        experts = " (experts: the two products with tokens)" if batch.model.num_experts is not None else ""
        yield (
            f"fp8: the linear layers of layers {layers[0]}-{layers[-1]} multiply in {parallel.fp8_format}, scaled "
            f"{parallel.fp8_recipe}{experts}; two copies of their weights, a byte an element, count as working"
        )


def _holdings(plan: RankStates) -> str:
    """`embedding, layers 0-7 (8)` and `layers 24-29 (6), norm, head`; several stages on a rank with a bar between."""
    predicts = any(meta.name.startswith(MULTI_TOKEN) for meta in plan.metas)
    return " | ".join(_holding(stage, predicts) for stage in plan.stages)


def _holding(stage: Stage, predicts: bool) -> str:
    parts = ["embedding"] if stage.first else []
    if len(stage.layers):
        first, last = stage.layers[0], stage.layers[-1]
        parts.append(f"layer {first}" if first == last else f"layers {first}-{last} ({len(stage.layers)})")
    parts += ["norm", *(["multi-token"] if predicts else []), "head"] if stage.last else []
    return ", ".join(parts) or "nothing"


def byte_text(size: int) -> str:
    """In the largest binary unit that keeps the number at or above 1."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size} B"


def _pipeline_line(config: RunConfig, microbatches: int) -> str:
    """The schedule, and the share of a step that ranks are idle if times follow FLOPs and messages take none: up to the
    gradient norm, for which all wait."""
    parallel, layout = config.parallel, pipeline_layout(config.model, config.parallel)
    costs = stage_costs(config.model, parallel)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    in_turns = parallel.overlap_moe_expert_parallel_comm
    schedule = build_schedule(parallel.schedule, layout.pp, microbatches, layout.chunks, group, in_turns)
    bubble = simulate(schedule, StageCosts(forward=costs, input_grad=costs, weight_grad=costs)).bubble
    where = f"{layout.num_stages} stages, {layout.chunks} on each rank" if layout.chunks > 1 else f"{layout.pp} stages"
    return f"pipeline {parallel.schedule}: {where}; bubble {bubble:.1%} of a step, by the FLOPs of the stages"


def batch_lines(stages: StagePlan, dims: ParallelDims) -> Iterator[str]:
    """Micro-batches, tokens a step, iterations, tokens and FLOPs of the run."""
    config, sizes = stages.base, stages.sizes
    for stage in stages.stages:
        where = f"stage {stage.name}: " if len(stages.stages) > 1 else ""
        yield f"{where}global batch {batch_line(stage.config, dims)}"
    if config.training.rampup_batch_size or config.training.step_batch_size_schedule:
        first, (end, _) = sizes.earlier[0][1], sizes.earlier[-1]
        yield f"batch size from {first} to {sizes.final} in {len(sizes.earlier)} steps over {end:,} samples"
    if dims.pp > 1:
        yield _pipeline_line(config, microbatches_of(stages.longest.config, dims))
    if stages.stages[-1].end is None:
        yield "length: one epoch of the training data"
        return
    from megatron.planner.flops import model_flops

    iterations = stages.iterations
    consumed = sizes.samples(iterations)
    tokens = stages.tokens(consumed)
    ends = [*(stage.first_token for stage in stages.stages[1:]), tokens]
    flops = sum(
        model_flops(stage.config.model).total * (end - stage.first_token)
        for stage, end in zip(stages.stages, ends, strict=True)
    )
    yield f"{iterations:,} iterations, {consumed:,} samples, {tokens:,} tokens, {flops:.6g} FLOPs in all"


def batch_line(config: RunConfig, dims: ParallelDims) -> str:
    """What the global batch consists of."""
    size, micro = BatchSizes.from_config(config).final, config.training.micro_batch_size
    return (
        f"{size} = micro-batch {micro} x {microbatches_of(config, dims)} micro-batches x {dims.dp} replicas; "
        f"{size * config.model.seq_length:,} tokens a step"
    )
