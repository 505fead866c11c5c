"""`pretrain_gpt.py --rehearse`: rehearses ranks of a world that is not there, and prints what a run would meet."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from megatron.core.dist_checkpointing.latest_checkpoint import candidates
from megatron.core.dist_checkpointing.path_kind import kind_of
from megatron.core.dist_checkpointing.storage import open_checkpoint
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis
from megatron.core.parts import MODEL_LOADERS
from megatron.extensions.planner.activations import activations_of_ranks
from megatron.extensions.planner.dry_run.description import micro_batch_of
from megatron.extensions.planner.dry_run.memory import come_and_go
from megatron.extensions.planner.memory import states_of_rank
from megatron.extensions.planner.rehearsal.fake_rank import LostRank, Rehearsal, rehearsal_of, rehearse_ranks
from megatron.extensions.planner.rehearsal.record import RankRecord, chosen_ranks
from megatron.extensions.planner.rehearsal.report import Report, problem_lines
from megatron.training.checkpointing import check_fits, check_may_start, converted
from megatron.training.config.batch_size import microbatches_of
from megatron.training.config.output_files import write_json
from megatron.training.config.run_config import RunConfig
from megatron.training.plan import plan_of


def rehearse(
    config: RunConfig, world_size: int, ranks: str, device_memory: float | None, json_file: str | None = None
) -> int:
    """Rehearses a resolved and validated configuration on `world_size` ranks, and prints the report. `ranks` is the
    value of --ranks, `device_memory` that of --device-memory in GiB. `json_file` is where the report is written as JSON
    ("" is standard output, and then nothing else is printed there). Returns the exit code: 1 if a run would fail, or if
    ranks could not be rehearsed. Raises OutputError if `json_file` cannot be written."""
    torch.set_num_threads(1)
    began = time.monotonic()
    dims = ParallelDims.from_config(config.parallel, world_size)
    longest = plan_of(config).longest.config
    limit = None if device_memory is None else round(device_memory * 2**30)
    rehearsal = rehearsal_of(config, world_size, microbatches_of(longest, dims), limit)
    chosen = chosen_ranks(ranks, dims)
    planned, notes = _planned_or_told(rehearsal)  # it also warms the caches of fake tensors, which the ranks inherit
    starts, problems = start_of_run(config)
    records, lost = _records(rehearsal, chosen)
    problems += problem_lines(records, world_size)
    found = Report(config, rehearsal, records, lost, planned, [*notes, *starts], problems)
    if json_file != "":
        print(*found.lines(), sep="\n")
        print(f"{time.monotonic() - began:.1f} s{_spent()}")
        print(*found.verdict(), sep="\n")
    if json_file is not None:
        write_json(found.as_object(), json_file)
    return 1 if found.problems or lost else 0


def _spent() -> str:
    """What the processes have taken."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    largest = max(each.ru_maxrss for each in used) // 2**10
    return f", {seconds:.1f} s of processor time, {largest} MiB in the largest process"


def _records(rehearsal: Rehearsal, ranks: Sequence[int]) -> tuple[list[RankRecord], list[LostRank]]:
    """By rank, with a line of progress on standard error."""
    records, lost = list[RankRecord](), list[LostRank]()
    with ProgressLine(len(ranks), "ranks rehearsed") as progress:
        try:
            for found in rehearse_ranks(rehearsal, ranks, len(os.sched_getaffinity(0))):
                if isinstance(found, LostRank):
                    lost.append(found)
                else:
                    records.append(found)
                progress.step()
        except OSError as error:  # no room for one process more
            done = {each.rank for each in records} | {each.rank for each in lost}
            lost += [LostRank(rank, str(error)) for rank in ranks if rank not in done]
    return sorted(records, key=lambda record: record.rank), sorted(lost)


def _planned_or_told(rehearsal: Rehearsal) -> tuple[dict[int, int], list[str]]:
    """`planned_bytes`; a plan runs layers by themselves, which a user's layer may not stand."""
    try:
        return planned_bytes(rehearsal), []
    except Exception as error:
        return {}, [f"no plan of memory to compare with: {type(error).__name__}: {error}"]


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


SECONDS_BETWEEN = 20.0
"""Between two lines where standard error is no terminal."""


class ProgressLine:
    """Counts steps of `total`: `7 of 22 ranks rehearsed, 12 s`."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self._terminal, self._began = sys.stderr.isatty(), time.monotonic()
        self._last = self._began

    def __enter__(self) -> ProgressLine:
        if self._terminal:
            self._print()
        return self

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        now = time.monotonic()
        if self._terminal or (now - self._last >= SECONDS_BETWEEN and self.done < self.total):
            self._last = now
            self._print()

    def _print(self) -> None:
        text = f"{self.done} of {self.total} {self.what}, {time.monotonic() - self._began:.0f} s"
        print(
            f"\r{text}\033[K" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def start_of_run(config: RunConfig) -> tuple[list[str], list[str]]:
    """(where a run would start, problems for which it would not). The metadata of checkpoints are read, and no tensors:
    a damaged file is not found."""
    options = config.checkpoint
    if options.load is None:
        return ["a run would start at iteration 0, without --load"], []
    load = Path(options.load)
    if kind_of(load) in MODEL_LOADERS:
        return [f"a run would start at iteration 0 with the weights of {load}, which were not read"], []
    try:
        return _start(config, load)
    except (ValueError, OSError) as error:
        return [], [f"start: {error}"]


def _start(config: RunConfig, load: Path) -> tuple[list[str], list[str]]:
    options, found = config.checkpoint, candidates(load)
    lines = list(found.remarks)
    for folder in found.folders:
        try:
            checkpoint = open_checkpoint(folder, Axis())
        except (ValueError, OSError) as error:
            lines.append(f"skipped checkpoint {folder}: {error}")
            continue
        consumed = int(checkpoint.payload.get("consumed_samples") or 0)
        plan = plan_of(config)
        there = config if len(plan.phases) < 2 else plan.trained(consumed).config
        check_fits(checkpoint, there, options.load_optim and not (options.finetune or converted(checkpoint)), None)
        anew = options.finetune or options.reset_iteration or converted(checkpoint)
        iteration = 0 if anew else checkpoint.payload.get("iteration", 0)
        return [*lines, f"a run would start at iteration {iteration} from {folder}, whose tensors were not read"], []
    if lines:
        raise ValueError(f"{load} holds no checkpoint that can be loaded: {'. '.join(lines)}")
    check_may_start(options)
    missing = "there is no such folder" if not load.exists() else "it holds no checkpoint"
    return [f"a run would start at iteration 0: --load {load}: {missing} on this machine"], []
