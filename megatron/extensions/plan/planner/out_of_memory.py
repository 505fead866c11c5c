"""Out-of-memory report: allocated and planned memory by category, and the cheapest configuration change with which the
run would fit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.memory import RankMemory, memory_of_ranks
from megatron.training.config.batch_size import byte_text
from megatron.training.config.flags import field_table, with_named
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve, validate
from megatron.training.reliability.launch import Launch
from megatron.training.run import TrainingRun

SECONDS = 5.0
"""Seconds after which no further change is planned, because the other ranks wait for the report."""

Change = Mapping[str, object]
"""Configuration change, as a map from fields to values."""

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def changes(config: RunConfig) -> Iterator[Change]:
    """Yield configuration changes that reduce the memory of a run, cheapest first.

    Changes that shard optimizer states and gradients come before changes that shard parameters, because sharding
    parameters adds communication. These changes are followed by updates on the host, offloading, recomputation of whole
    layers, and other layouts, in this order.
    """
    bf16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    yield {"use_distributed_optimizer": True}
    yield {"use_precision_aware_optimizer": True, **bf16}
    yield {"data_parallel_sharding_strategy": "optim_grads"}
    if (samples := config.training.micro_batch_size) > 1:
        yield {"micro_batch_size": samples // 2}
    yield {"recompute_granularity": "selective"}
    yield {"data_parallel_sharding_strategy": "optim_grads_params"}
    for fraction in (0.5, 1.0):
        yield {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    if (layers := max((len(stage.layers) for stage in pipeline_stages(config.model, config.parallel)), default=0)) > 1:
        yield {"cpu_offloading": True, "cpu_offloading_num_layers": layers - 1}
    yield FULL
    yield FULL | {"data_parallel_sharding_strategy": "optim_grads_params"}
    yield {"tensor_model_parallel_size": 2 * config.parallel.tensor_model_parallel_size}
    yield FULL | {"tensor_model_parallel_size": 2 * config.parallel.tensor_model_parallel_size}


def memory_report(config: RunConfig, world_size: int, pp_rank: int, run: TrainingRun | None) -> str:
    """Return a multi-line report that states the planned and the allocated bytes by category for the ranks at
    `pp_rank`, and names a configuration change with which the run would fit.

    The named change is the first of `changes` whose plan fits into the device. If the device's memory size is unknown,
    as on CPUs, the report names the first change that reduces the planned memory.

    Args:
        config: Configuration of the run.
        world_size: Number of ranks.
        pp_rank: Pipeline rank that ran out of memory.
        run: Training run; None if an error occurred before it was built.
    """
    cache, until = PlannerCache(), time.monotonic() + SECONDS
    plan, held = planned_memory(config, world_size, pp_rank, cache), held_bytes(run)
    size = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    planned = {
        "parameters": plan.sizes["weights"],
        "gradients": plan.sizes["gradients"],
        "optimizer": plan.sizes["optimizer"],
        "activations and working": plan.sizes["activations"] + plan.sizes["working"],
        "total": plan.total,
    }
    if plan.plan.memory.host:
        planned["states in host memory"] = plan.plan.memory.host
    if config.parallel.offloaded_layers:
        planned["activations on host"] = plan.activations.host
    lines = [f"{'memory of this rank':<24}{'planned':>12}{'held':>12}"]
    for name, here in planned.items():
        now = byte_text(held[name]) if name in held else "unknown"
        lines.append(f"{name:<24}{byte_text(here):>12}{now:>12}")
    if size is not None:
        lines.append(f"the device has {byte_text(size)}")
    # A change does not free memory that the plan does not contain, such as memory of other programs or fragmentation.
    limit = plan.total if size is None else size - max(0, held["total"] - plan.total)
    lines.append(_cheapest(config, world_size, pp_rank, limit, until, cache))
    return "\n".join(lines)


def _cheapest(config: RunConfig, world_size: int, pp_rank: int, limit: int, until: float, cache: PlannerCache) -> str:
    for change in changes(config):
        if time.monotonic() > until:
            break
        changed = with_change(config, change, world_size)
        if changed is None:
            continue
        plan = planned_memory(changed, world_size, pp_rank, cache)
        host = plan.plan.memory.host
        if plan.total < limit and host < host_memory_of_a_rank():
            beside = f" and {byte_text(host)} of host memory" if host else ""
            return f"cheapest change that fits: {flags_of(change)} (plan: {byte_text(plan.total)}{beside})"
    return "no single change is known to fit: raise the model-parallel sizes, or use more ranks"


def with_change(config: RunConfig, change: Change, world_size: int) -> RunConfig | None:
    """Apply a change to a configuration. Return None if the change has no effect or if the changed configuration is
    invalid."""
    changed = with_named(config, change)
    if changed == config:
        return None
    changed = resolve(replace(changed, parallel=replace(changed.parallel, data_parallel_size=None)), world_size)
    return None if validate(changed, world_size) else changed


def flags_of(change: Change) -> str:
    """Format the change as command-line flags."""
    table = field_table()
    return " ".join(
        f"--{name.replace('_', '-')}" if value is True else f"{table[name].name} {value}"
        for name, value in change.items()
    )


def planned_memory(config: RunConfig, world_size: int, pp_rank: int, cache: PlannerCache) -> RankMemory:
    """Return the planned memory of a rank at `pp_rank`. `cache` keeps measurements that the plans of further changes
    can reuse."""
    return memory_of_ranks(config, world_size, cache)[pp_rank]


def host_memory_of_a_rank() -> float:
    """Return the free host memory in bytes per rank, with one rank per device; infinite if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    free = next((int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:")), math.inf)
    return free / max(1, torch.cuda.device_count())


def held_bytes(run: TrainingRun | None) -> dict[str, int]:
    """Return the bytes that this rank holds, by category. Categories of unknown size are omitted."""
    held: dict[str, int] = {}
    if run is not None:
        held["parameters"], held["gradients"], host = run.ddp.nbytes
        held["optimizer"], states = run.optimizer.nbytes
        held["states in host memory"] = host + states
        if (offload := next(iter(run.stages.values())).decoder.offload) is not None:
            held["activations on host"] = offload.pool.nbytes
    if torch.cuda.is_available():
        held["total"] = torch.cuda.max_memory_reserved()
        if run is not None:
            held["activations and working"] = torch.cuda.max_memory_allocated() - sum(
                held[name] for name in ("parameters", "gradients", "optimizer")
            )
    return held


def explain(error: BaseException, config: RunConfig, launch: Launch, run: TrainingRun | None) -> None:
    """Add `memory_report` to a device's out-of-memory error, so that tracebacks show the report."""
    pp_rank = ParallelDims.from_config(config.parallel, launch.world_size).coords(launch.rank)["pp"]
    error.add_note(memory_report(config, launch.world_size, pp_rank, run))
