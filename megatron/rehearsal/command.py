"""`pretrain_gpt.py --rehearse`: rehearses ranks of a world that is not there, and prints what a run would meet."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import torch

from megatron.core.parallel_dims import ParallelDims
from megatron.planner.activations import activations_of_ranks
from megatron.planner.memory import states_of_rank
from megatron.planner.rehearsal.ranks import chosen_ranks
from megatron.planner.rehearsal.record import RankRecord
from megatron.rehearsal.fake_rank import Rehearsal, device_of, rehearsal_of, rehearse_ranks
from megatron.rehearsal.report import compared_line, memory_lines, problem_lines, shard_lines, traffic_lines
from megatron.training.config.dry_run.batch import micro_batch_of, microbatches_of
from megatron.training.config.dry_run.memory import come_and_go
from megatron.training.config.run_config import RunConfig
from megatron.training.config.stages.plan import stage_plan


def rehearse(config: RunConfig, world_size: int, ranks: str, device_memory: float | None) -> int:
    """Rehearses a resolved and validated configuration on `world_size` ranks, and prints the report. `ranks` is the
    value of --ranks, `device_memory` that of --device-memory in GiB. Returns the exit code: 1 if a run would fail."""
    torch.set_num_threads(1)
    began = time.monotonic()
    dims = ParallelDims.from_config(config.parallel, world_size)
    longest = stage_plan(config).longest.config
    limit = None if device_memory is None else round(device_memory * 2**30)
    rehearsal = rehearsal_of(config, world_size, microbatches_of(longest, dims), limit)
    chosen = chosen_ranks(ranks, dims)
    planned = _planned_or_told(rehearsal)  # it also warms the caches of fake tensors, which the ranks inherit
    records = list(rehearse_ranks(rehearsal, chosen, len(os.sched_getaffinity(0))))
    records.sort(key=lambda record: record.rank)
    for line in report(rehearsal, records, planned):
        print(line)
    problems = problem_lines(records, world_size)
    processor = sum(record.seconds for record in records)
    print(f"{time.monotonic() - began:.1f} s, {processor:.1f} s of processor time in the ranks")
    if problems:
        print("A run would fail:", *(f"  {line}" for line in problems), sep="\n")
        return 1
    print("No rank fails, and their collectives agree.")
    return 0


def _planned_or_told(rehearsal: Rehearsal) -> dict[int, int]:
    """`planned_bytes`; a plan runs layers by themselves, which a user's layer may not stand."""
    try:
        return planned_bytes(rehearsal)
    except Exception as error:
        print(f"no plan of memory to compare with: {type(error).__name__}: {error}")
        return {}


def planned_bytes(rehearsal: Rehearsal) -> dict[int, int]:
    """The memory of each pipeline rank as `--dry-run` plans it, for as many micro-batches as are rehearsed."""
    config, dims = rehearsal.config, rehearsal.dims
    found = {}
    for held, rank in zip(
        activations_of_ranks(micro_batch_of(config), rehearsal.rehearsed), range(dims.pp), strict=True
    ):
        plan = states_of_rank(config.model, config.parallel, config.optimizer, config.ddp, dims, rank)
        found[rank] = plan.memory.total + held.peak + come_and_go(plan, held, config)
    return found


def report(rehearsal: Rehearsal, records: Sequence[RankRecord], planned: dict[int, int]) -> Iterator[str]:
    """What was rehearsed, memory by rank, and traffic by axis."""
    rehearsed, microbatches = rehearsal.rehearsed, rehearsal.microbatches
    device = "a CPU" if device_of(rehearsal.config) == "cpu" else "a GPU"
    shown = f"{rehearsed} of {microbatches}" if rehearsed < microbatches else str(microbatches)
    yield f"Rehearsal of {len(records)} of {rehearsal.world_size} ranks, {shown} micro-batches, on fake tensors"
    yield f"Memory of {device}"
    yield from (f"  {line}" for line in memory_lines(records, planned))
    yield f"Sent in a step of {microbatches} micro-batches"
    yield from (f"  {line}" for line in traffic_lines(records, rehearsed, microbatches))
    yield compared_line(records)
    yield from shard_lines(records, rehearsal.world_size)
