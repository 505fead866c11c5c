"""Print the plan of a run without starting the run. Planning needs no GPU and no process group. torch is imported only
when something must be measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron.core.config.losses import AUTO, chunk_size
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.core.dist_checkpointing.path_kind import data_kind_of
from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.layer_split import stage_costs
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.core.pipeline_parallel.stage_parameters import active_parameters, count_parameters
from megatron.core.registry import imported
from megatron.extensions.plan.planner.device_file import DeviceFile, read_device
from megatron.extensions.plan.planner.failures.expected import AskedFailures
from megatron.extensions.plan.planner.failures.of_run import RunOnFailing
from megatron.extensions.plan.planner.flags import PlannedRun, PlansSection, Section
from megatron.extensions.plan.planner.loss_chunks import chosen_chunk
from megatron.extensions.plan.planner.memory import memory_of_ranks
from megatron.extensions.plan.planner.memory_lines import RANKS_SHOWN, Fit, memory_lines
from megatron.extensions.plan.planner.time.pipeline import Schedule
from megatron.extensions.plan.simulator.simulator import StageCosts
from megatron.training.config.batch_size import batch_line, batch_schedule, microbatches_of, shape_line
from megatron.training.config.commands import Prepared
from megatron.training.config.flags import flat_values, named_value
from megatron.training.config.output_files import write_json
from megatron.training.config.problem import Problem
from megatron.training.config.reading import foreign_programs
from megatron.training.config.run_config import RunConfig
from megatron.training.plan import Phase, RunPlan, plan_of
from megatron.training.step_parts import late_update

if TYPE_CHECKING:
    from megatron.extensions.plan.planner.fake_stage import PlannerCache
    from megatron.extensions.plan.planner.time.step_time import StepTime


def step_lines(time: StepTime) -> Iterator[str]:
    """Yield lines about the speed of a step, its bottleneck, and the breakdown of its time."""
    yield f"{time.device.name}, {time.gpus_per_node} ranks per node: all figures are predictions, not measurements"
    mfu = share_text(time.mfu)
    yield (
        f"{time.seconds:.4g} s a step, {time.tokens_per_second / time.world_size:,.0f} tokens/s a device, "
        f"{time.tflops:.4g} TFLOP/s a device (causal), MFU {mfu} (causal), bound by {_title(time.bound_by)}"
    )
    if time.parts_of_pp_rank is not None:
        yield (
            f"mean bubble {time.bubble:.1%} of the whole step: idle time and messages during the passes, averaged over "
            "the pipeline ranks"
        )
        yield f"the time of pp {time.parts_of_pp_rank}, which has the most work:"
    for subject, seconds in sorted(time.parts.items(), key=lambda part: -part[1]):
        if seconds:
            title = "bubble of this rank" if subject == "pipeline_bubble" else _title(subject)
            yield f"    {title:<22}{1e3 * seconds:>12,.1f} ms{seconds / time.seconds:>8.1%}"


def share_text(share: float | None) -> str:
    """Format a share as a percentage, or as "unknown" if it is None."""
    return "unknown" if share is None else f"{share:.1%}"


def _title(subject: str) -> str:
    return subject.replace("_", " ").replace("tp ", "TP ").replace("cp ", "CP ").replace("ep ", "EP ")


def print_plan(
    asked: Prepared,
    device: str | None,
    gpus_per_node: int | None,
    device_memory: float | None,
    problems: Sequence[Problem],
    failures: AskedFailures | None = None,
) -> None:
    """Print the plan of a validated configuration. If a `device` is given, also print the predicted step time. The plan
    states whether the run fits devices of `device_memory` GiB (default: the memory of `device`), and what other
    programs with these flags, such as Megatron-LM, do differently. If `failures` is given, it also states the cost of
    failures.

    The same content is written as JSON to the file that --json names. The keys of the JSON object are "world_size",
    "config" (every field by its flat name), "plan" (lines by title), "memory" (bytes of each pipeline rank), "time"
    (`StepTime`), "device_memory" (bytes), "fits", "fullest_pp_rank", "bytes_over" and "failures". The keys
    "host_memory" and "host_bytes_over" are added if the host's memory is too small. `problems` lists missing input
    files, which are included in the JSON object; the caller reports them. If the path is "", only the JSON is printed.
    Raises OutputError if the file cannot be written, and DeviceError if the device file lacks a needed entry."""
    from megatron.extensions.plan.planner.fake_stage import PlannerCache
    from megatron.extensions.plan.planner.time.step_time import predict_step

    config = asked.config
    world_size = asked.world_size
    dims, cache = ParallelDims.from_config(config.parallel, world_size), PlannerCache()
    run = plan_of(config)
    largest = run.longest.config
    of = f" in phase {run.longest.name}, the largest" if len(run.phases) > 1 else ""
    speeds = None if device is None else read_device(device)
    step = None if speeds is None else predict_step(largest, world_size, speeds, gpus_per_node, cache)
    memory = memory_of_ranks(largest, world_size, cache)
    size = device_memory or (step.device.memory_gib if step is not None else None)
    fit = Fit.of(memory, size, speeds)
    chosen = [*_chosen_chunks(largest)]
    if step is not None and speeds is not None:
        time_of = partial(predict_step, world_size=world_size, device=speeds, gpus_per_node=gpus_per_node, cache=cache)
        memory_of = partial(memory_of_ranks, world_size=world_size, cache=cache)
        choice = chosen_chunk(largest, world_size, step, memory, time_of, memory_of)
        chosen += [] if choice is None else [choice.line]
    failing = None if failures is None or step is None else RunOnFailing.of(largest, dims, memory, step, failures)
    sections: list[tuple[str, Iterable[str]]] = [
        ("Model", model_lines(config, cache)),
        (f"Groups, world size {world_size}", group_lines(dims)),
        (f"Pipeline stages and memory of each rank{of}", [*memory_lines(largest, dims, memory), *fit.lines, *chosen]),
        ("Batch and length", batch_lines(run, dims, cache)),
        ("Data", [line for phase in run.phases for line in data_lines(run, phase, dims)]),
        (f"Predicted step{of}", step_lines(step) if step is not None else ()),
        ("Failures", failing.lines if failing is not None else ()),
        *_of_extensions(largest, world_size, gpus_per_node, speeds, step, failing),
        *((f"Different from {name}", of.differences(config, asked.given)) for name, of in foreign_programs().items()),
    ]
    plan = _print_sections(sections, silent=asked.json_file == "")
    if asked.json_file is not None:
        parts: dict[str, object] = {"world_size": world_size, "config": flat_values(config), "plan": plan}
        parts["memory"] = [rank.record for rank in memory]
        parts |= fit.record
        parts |= {} if step is None else {"time": step.record}
        parts |= {} if failing is None else {"failures": failing.record}
        parts |= {"problems": [each.record for each in problems]} if problems else {}
        write_json(parts, asked.json_file)


def _chosen_chunks(config: RunConfig) -> Iterator[str]:
    """Yield a line with the result of --loss-chunk-tokens auto, if this flag is given."""
    if config.parallel.loss_chunk_tokens == AUTO:
        model = config.model
        tokens = chunk_size(AUTO, model.padded_vocab_size, model.num_layers, model.hidden_size)
        yield f"--loss-chunk-tokens auto: {f'{tokens:,} tokens' if tokens else 'all tokens at once'}"


def _of_extensions(
    config: RunConfig,
    world_size: int,
    gpus_per_node: int | None,
    device: DeviceFile | None,
    step: StepTime | None,
    failing: RunOnFailing | None,
) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the title and the lines of each plan section that an extension adds."""
    ranks = max(size for size in range(1, 9) if world_size % size == 0) if step is None else step.gpus_per_node
    link = None if device is None else device.links.get("network")
    network = None if link is None or device is None else 1e9 * link.gb_per_second * device.adapters_per_node
    seconds, host = None if step is None else step.seconds, None if device is None else device.host_gb_per_second
    run = PlannedRun(
        config,
        world_size,
        gpus_per_node or ranks,
        seconds,
        network,
        None if host is None else 1e9 * host,
        None if failing is None else failing.expected,
    )
    asked = [options.plan_section(config) for options in config.extension_options if isinstance(options, PlansSection)]
    for title, name in (section for section in asked if section is not None):
        lines: Section = imported(name)
        yield title, lines(run)


def _print_sections(sections: Iterable[tuple[str, Iterable[str]]], silent: bool) -> dict[str, list[str]]:
    """Print each non-empty section as soon as it is known. Return the lines of each section, keyed by title."""
    plan: dict[str, list[str]] = {}
    for title, lines in sections:
        if found := list(lines):
            plan[title] = found
            if not silent:
                print("\n".join([title, *(f"  {line}" for line in found)]))
    return plan


GROUPS_SHOWN = 4

MOST_LISTED = 2**17
"""Maximum number of ranks for which the plan lists the ranks of process groups. With more ranks, building these lists
takes seconds."""


def group_lines(dims: ParallelDims) -> Iterator[str]:
    """Yield lines that list the process groups along each axis with more than one rank."""
    axes = [("TP", "tp"), ("CP", "cp"), ("DP", "dp"), ("PP", "pp"), ("EP", "ep")]
    if dims.ep > 1 or dims.expt_tp != dims.tp:
        axes += [("ETP", "expt_tp"), ("EDP", "expt_dp")]  # ETP and EDP are the tensor and data parallelism of experts
    yield ", ".join(f"{name} {dims.size(axis)}" for name, axis in axes)
    for name, axis in axes:
        size = dims.size(axis)
        if size > 1 and dims.world_size > MOST_LISTED:
            yield f"{name} {dims.world_size // size} groups of {size}, not listed above {MOST_LISTED:,} ranks"
        elif size > 1:
            groups = dims.groups(axis)
            shown = " ".join(_ranks(group) for group in groups[:GROUPS_SHOWN])
            more = f" ... {_ranks(groups[-1])}" if len(groups) > GROUPS_SHOWN else ""
            yield f"{name} {len(groups)} groups of {size}: {shown}{more}"


def _ranks(group: tuple[int, ...]) -> str:
    """Format ranks as `[0,1]`. If there are many ranks, show only the first few and the last."""
    if len(group) <= RANKS_SHOWN:
        return "[" + ",".join(map(str, group)) + "]"
    return "[" + ",".join(map(str, group[:3])) + f",...,{group[-1]}]"


def model_lines(config: RunConfig, cache: PlannerCache) -> Iterator[str]:
    """Describe the shape, parameters and FLOPs of the model. If `cache` already records which layers are identical,
    they are not compared again."""
    from megatron.extensions.plan.planner.flops import model_flops, update_flops

    m = config.model
    yield shape_line(m)
    attention = _local_attention(m) + _sinks(m)
    yield f"sequence length {m.seq_length}, positions {_positions(m)}{attention}, {m.normalization}"
    if (pattern := named_value(config, "hybrid_layer_pattern")) is not None:
        attends, dense = sum(kind.attends for kind in m.layers), len(m.dense_layers)
        yield f"layers of one sublayer, {pattern}: {attends} with attention, {dense} with the MLP"
    for variant in m.linear_attentions:
        whole = [name for name in MIXERS if variant in (name, *MIXERS.facts(name).includes)]
        those = sum(kind.linear in whole for kind in m.layers)
        yield f"{those} layers with {variant}{MIXERS.facts(variant).described(m)}"
    tied = "shared with" if m.tied_embeddings else "separate from"
    source = "" if config.tokenizer.tokenizer_type else " (no tokenizer given)"
    yield f"vocabulary {m.vocab_size:,}{source}, padded to {m.padded_vocab_size:,}; embeddings {tied} the output layer"
    if m.num_experts is not None:
        yield _experts_line(m)
    if m.mtp_depths:
        share = f"their mean loss is multiplied by {m.mtp_loss_scaling_factor:g}"
        by_pattern = "/" in (pattern or "")
        like = "with a layer that follows the pattern" if by_pattern else "with a layer like the last one"
        yield f"multi-token prediction: {m.mtp_depths} modules, each {like}; {share}"
    count = count_parameters(m)
    active = f", active per token {active_parameters(m):,}" if m.num_experts is not None else ""
    yield f"parameters {count.total:,}{active}"
    for part, number in vars(count).items():
        if number or part not in ("router", "experts", "other"):
            yield f"    {part.replace('_', ' '):<14}{number:>22,}"
    flops = model_flops(m, kinds=cache.kinds_of(m))
    counted = "active parameters" if m.num_experts is not None else "parameters"
    yield (
        f"FLOPs per token {flops.total:.6g} forward and backward: {flops.matmul:.6g} matrix multiplications "
        f"(6 x {counted}), {flops.attention:.6g} attention (causal: half of the square), counted on fake tensors"
    )
    if update := update_flops(m, config.optimizer):
        tokens = (config.training.global_batch_size or 1) * m.seq_length
        of_batch = update / (flops.total * tokens)
        share = f"{of_batch:.2%} of the FLOPs of a batch of {tokens:,} tokens"
        yield f"FLOPs of matrix products in an update {update:.6g}, {share}"


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
        SINKS[str(own["softmax_type"])] or "no sinks" if "softmax_type" in own else "",
    ]
    heads = f" ({', '.join(filter(None, shown))})" if any(shown) else ""
    return f", {kind}{where}{heads}" if local else ""


SINKS = {"vanilla": "", "off-by-one": "attention sinks of 0", "learnable": "attention sinks"}


def _sinks(m: TransformerConfig) -> str:
    return f", {SINKS[m.softmax_type]}" if SINKS[m.softmax_type] else ""


def _experts_line(m: TransformerConfig) -> str:
    shared = m.moe_shared_expert_intermediate_size
    latent = f" on latents of width {m.moe_latent_size}" if m.moe_latent_size else ""
    beside = f" and to a shared expert of width {shared}" if shared else ""
    zero = f" and {m.moe_zero_experts} zero-computation experts" if m.moe_zero_experts else ""
    groups = f" in {m.moe_router_group_topk} of {m.moe_router_num_groups} groups" if m.moe_router_group_topk else ""
    return (
        f"{m.num_experts} experts of width {m.moe_ffn_size}{latent}{zero} in {len(m.moe_layers)} layers; each token is "
        f"routed to {m.moe_router_topk} of them{groups}{beside}; {m.moe_router_scores} scores, balanced by "
        f"{' and '.join(m.moe_router_load_balancing_type)}"
    )


def _pipeline_line(config: RunConfig, microbatches: int) -> str:
    """Describe the pipeline schedule and its bubble. The bubble is stated as a share of the time of the passes. The
    bubble assumes that times are proportional to FLOPs and that messages take no time.

    The step ends when the gradient norm is known. All ranks wait for the gradient norm unless
    --optimizer-post-validation is given.
    """
    schedule, costs = Schedule.of_run(config), stage_costs(config.model, config.parallel)
    bubble = schedule.bubble(StageCosts(forward=costs, input_grad=costs, weight_grad=costs), microbatches)
    layout, ahead = schedule.layout, late_update(config) is not None
    where = f"{layout.num_stages} stages, {layout.chunks} on each rank" if layout.chunks > 1 else f"{layout.pp} stages"
    unless = (
        " in steps that are neither clipped nor skipped"
        if ahead and PIPELINE_SCHEDULES.facts(schedule.name).flushes
        else ""
    )
    ideal = "if times are proportional to FLOPs"
    return f"pipeline {schedule.name}: {where}; schedule bubble {bubble:.1%} of the time of the passes{unless}, {ideal}"


def batch_lines(plan: RunPlan, dims: ParallelDims, cache: PlannerCache) -> Iterator[str]:
    """Describe micro-batches, tokens per step, iterations, tokens and FLOPs of the run.

    If `cache` already records which layers of the model are identical, the layers are not compared again.
    """
    config, sizes = plan.base, plan.sizes
    for phase in plan.phases:
        where = f"phase {phase.name}: " if len(plan.phases) > 1 else ""
        yield f"{where}global batch {batch_line(phase.config, dims)}"
    if batch_schedule(config):
        first, (end, _) = sizes.earlier[0][1], sizes.earlier[-1]
        yield f"batch size from {first} to {sizes.final} in {len(sizes.earlier)} steps over {end:,} samples"
    if dims.pp > 1:
        yield _pipeline_line(config, microbatches_of(plan.longest.config, dims))
    if plan.phases[-1].end is None:
        yield "length: one epoch of the training data"
        return
    from megatron.extensions.plan.planner.flops import model_flops

    iterations = plan.iterations
    consumed = sizes.samples(iterations)
    tokens = plan.tokens(consumed)
    ends = [*(phase.first_token for phase in plan.phases[1:]), tokens]
    models = [phase.config.model for phase in plan.phases]
    per_token = [model_flops(model, kinds=cache.kinds_of(model)).total for model in models]
    flops = sum(each * (end - phase.first_token) for each, phase, end in zip(per_token, plan.phases, ends, strict=True))
    yield f"{iterations:,} iterations, {consumed:,} samples, {tokens:,} tokens, {flops:.6g} FLOPs in all"


def data_lines(plan: RunPlan, phase: Phase, dims: ParallelDims) -> Iterator[str]:
    """Describe the training datasets of a phase as found on this machine."""
    from megatron.core.datasets.build import source_lines
    from megatron.core.datasets.dataset import StepShape

    config, data = phase.config, phase.config.data
    yield from plan.lines(phase)
    if data.dataset != "gpt":
        yield "synthetic" if data.dataset == "mock" else f"--dataset-type {data.dataset}"
        return
    samples = None
    if phase.end is not None:
        end = plan.sizes.samples(plan.iterations) if phase == plan.phases[-1] else phase.end
        samples = end - phase.first_sample
    batch, step = config.training.global_batch_size, None
    if batch is not None:
        step = StepShape(batch, dims.dp, config.training.micro_batch_size, config.parallel.ranks_by_queries)
    yield from source_lines(data, samples, config.model.seq_length, step, _other_line)


def _other_line(path: str) -> str | None:
    """Return a line about text files that have not been tokenized yet; None for an indexed dataset."""
    if (kind := data_kind_of(path)) is None:
        return None
    try:
        return kind.describe("--data-path", path)
    except ValueError as error:
        return str(error)
