"""Run the start and one training step of a large job on one machine, with fake tensors (`pretrain_gpt.py --rehearse`).

A rehearsal reports failing ranks, mismatched collectives, memory use, and the bytes that ranks send.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath

import torch

from megatron.core.dist_checkpointing.file_storage import located, storage_of
from megatron.core.dist_checkpointing.path_kind import is_foreign_model
from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.core.parallel_state import Axis
from megatron.extensions.plan.planner.memory import memory_of_ranks
from megatron.extensions.plan.planner.rehearsal.fake_rank import (
    Lost,
    Rehearsal,
    device_of,
    rehearsal_of,
    rehearse_ranks,
)
from megatron.extensions.plan.planner.rehearsal.matching import (
    Failure,
    RankRecord,
    bytes_sent,
    chosen_ranks,
    compared,
    coverage_problems,
    mismatches,
    written_bytes,
)
from megatron.extensions.plan.planner.terminal import progress
from megatron.training.checkpoints.loading import check_fits, check_may_start, choose_checkpoint, converted
from megatron.training.config.batch_size import byte_text
from megatron.training.config.commands import Prepared
from megatron.training.config.flags import flat_values
from megatron.training.config.output_files import write_json
from megatron.training.config.run_config import RunConfig
from megatron.training.plan import plan_of


def rehearse(asked: Prepared, ranks: str, device_memory: float | None) -> int:
    """Rehearse a validated configuration on its ranks, and print the report.

    `ranks` is the value of --ranks, and `device_memory` is the value of --device-memory in GiB. The report is also
    written as JSON to the file that --json names. If this path is "", only the JSON is printed. Returns exit code 1 if
    a run would fail or if ranks could not be rehearsed. Raises OutputError if the file cannot be written.
    """
    config = asked.config
    world_size = asked.world_size
    json_file = asked.json_file
    torch.set_num_threads(1)
    began = time.monotonic()
    limit = None if device_memory is None else round(device_memory * 2**30)
    rehearsal = rehearsal_of(config, world_size, limit)
    chosen = chosen_ranks(ranks, rehearsal.dims)
    planned, notes = _planned_or_told(rehearsal)  # planning also warms the fake-tensor caches, which the ranks inherit
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
    """Format the time and memory used by all processes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    largest = max(each.ru_maxrss for each in used) // 2**10
    return f", {seconds:.1f} s of processor time, {largest} MiB in the largest process"


def _records(rehearsal: Rehearsal, ranks: Sequence[int]) -> tuple[list[RankRecord], list[Lost]]:
    """Rehearse the ranks and show progress on standard error. Return the records and the lost ranks, both sorted by
    rank."""
    records = list[RankRecord]()
    lost = list[Lost]()
    began = time.monotonic()
    with progress() as say:
        try:
            for found in rehearse_ranks(rehearsal, ranks, len(os.sched_getaffinity(0))):
                if isinstance(found, Lost):
                    lost.append(found)
                else:
                    records.append(found)
                done = len(records) + len(lost)
                say(f"{done} of {len(ranks)} ranks rehearsed, {time.monotonic() - began:.0f} s")
        except OSError as error:  # the system cannot start another process
            ended = {each.rank for each in records} | {each.job for each in lost}
            lost += [Lost(rank, str(error)) for rank in ranks if rank not in ended]
    return sorted(records, key=lambda record: record.rank), sorted(lost)


def _planned_or_told(rehearsal: Rehearsal) -> tuple[dict[int, int], list[str]]:
    """Return the memory of each pipeline rank as planned by `--dry-run`. If planning fails, return no memory and a note
    that states the reason.

    The plan covers the same number of micro-batches as the rehearsal. Planning may fail because it runs layers
    separately, which a custom layer may not support.
    """
    try:
        memory = memory_of_ranks(rehearsal.config, rehearsal.world_size)
        return {rank.plan.pp_rank: rank.total for rank in memory}, []
    except Exception as error:
        return {}, [f"no memory plan to compare with: {type(error).__name__}: {error}"]


def start_of_run(config: RunConfig) -> tuple[list[str], list[str]]:
    """Return the iteration at which a run would start, and problems that prevent it.

    Only the metadata of checkpoints is read, so damaged tensors are not detected.
    """
    options = config.checkpoint
    if options.load is None:
        return ["a run would start at iteration 0, because --load is not given"], []
    load = located(options.load)
    if is_foreign_model(load):
        return [f"a run would start at iteration 0 with the weights of {load}, which were not read"], []
    try:
        return _start(config, load)
    except (ValueError, OSError, CheckpointError) as error:
        return [], [f"start: {error}"]


def _start(config: RunConfig, load: PurePath) -> tuple[list[str], list[str]]:
    options, lines = config.checkpoint, list[str]()
    checkpoint = choose_checkpoint(load, Axis(), lines.append, verified=False)
    if checkpoint is None:
        check_may_start(options)
        missing = "there is no such folder" if not storage_of(load).exists(load) else "it holds no checkpoint"
        return [f"a run would start at iteration 0: --load {load}: {missing} on this machine"], []
    plan, consumed = plan_of(config), int(checkpoint.payload.get("consumed_samples") or 0)
    there = config if len(plan.phases) < 2 else plan.trained(consumed).config
    check_fits(checkpoint, there, options.load_optim and not (options.finetune or converted(checkpoint)), None)
    anew = options.anew or converted(checkpoint)
    iteration, folder = 0 if anew else checkpoint.payload.get("iteration", 0), checkpoint.folder
    return [*lines, f"a run would start at iteration {iteration} from {folder}, whose tensors were not read"], []


SITES_SHOWN = 4


@dataclass(frozen=True)
class Report:
    """Result of a rehearsal."""

    config: RunConfig
    """Configuration of the rehearsed run."""

    rehearsal: Rehearsal
    records: Sequence[RankRecord]
    lost: Sequence[Lost]
    """Ranks whose processes ended without a record."""

    planned: Mapping[int, int]
    """Planned memory of each pipeline rank in bytes, as `--dry-run` would report it."""

    notes: Sequence[str]
    problems: Sequence[str]
    """All problems that would make a run fail."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report: the rehearsed ranks, memory by rank, and traffic by axis."""
        records = self.records
        rehearsed = self.rehearsal.rehearsed
        microbatches = self.rehearsal.microbatches
        shown = f"{rehearsed} of {microbatches}" if rehearsed < microbatches else str(microbatches)
        ranks = f"{len(records)} of {self.rehearsal.world_size} ranks"
        yield f"Rehearsal of {ranks}, {shown} micro-batches, on fake tensors"
        if records:
            yield f"Memory of a {self._device}"
            yield from (f"  {line}" for line in self._memory_lines())
            yield f"Sent in a step of {microbatches} micro-batches"
            yield from (f"  {line}" for line in self._traffic_lines())
            yield self._compared_line()
            yield from self._shard_lines()
        yield from self.notes

    def _memory_lines(self) -> Iterator[str]:
        """Yield one line per rank with three sizes: the memory after the run is built, the measured peak, and the
        planned peak."""
        width = max(len(record.name()) for record in self.records)
        yield f"{'':<{width}}{'built':>12}{'peak':>12}{'planned':>12}  at the peak"
        for record in self.records:
            shown = record.built, record.peak, self._planned(record)
            text = "".join(f"{'' if size is None else byte_text(size):>12}" for size in shown)
            host = f"; {byte_text(record.host)} in host memory" if record.host else ""
            yield f"{record.name():<{width}}{text}  {record.peak_phase}{host}"

    def _planned(self, record: RankRecord) -> int | None:
        return self.planned.get(record.coords.get("pp", 0))

    def _traffic_lines(self) -> Iterator[str]:
        """Yield one line for each axis. The line states the rank that sends the most bytes along this axis, and the
        rank's calls and bytes in a step."""
        most: dict[str, tuple[int, int, RankRecord]] = {}
        for record in self.records:
            for axis, (calls, size) in self._sent_by_axis(record).items():
                if axis not in most or (size, calls) > (most[axis][1], most[axis][0]):
                    most[axis] = calls, size, record
        yield f"{'axis':<20}{'calls':>10}{'sent':>14}  by"
        for axis, (calls, size, record) in sorted(most.items(), key=lambda item: -item[1][1]):
            yield f"{axis:<20}{calls:>10,}{byte_text(size):>14}  {record.name()}"

    def _sent_by_axis(self, record: RankRecord) -> dict[str, tuple[int, int]]:
        """Return the pair (number of calls, bytes sent) of a whole step, keyed by axis.

        Each micro-batch that was not rehearsed is assumed to send as much as the middle rehearsed micro-batch.
        """
        calls = Counter[str]()
        sizes = Counter[str]()
        rehearsed = self.rehearsal.rehearsed
        for each in record.collectives:
            axis = record.axes.get(each.group, "user's")
            times = 1 + (self.rehearsal.microbatches - rehearsed) * (each.microbatch == rehearsed // 2)
            calls[axis] += times
            sizes[axis] += times * bytes_sent(each, record.rank)
        return {axis: (calls[axis], sizes[axis]) for axis in calls}

    def _compared_line(self) -> str:
        """Return a line with the number of compared collectives, or with the reason why none could be compared."""
        groups, calls = compared(self.records)
        if not groups:
            alone = "no two of the rehearsed ranks take part in the same collective; use --ranks all-distinct"
            why = alone if self.rehearsal.world_size > 1 else "the run has one rank"
            return f"no collectives could be compared: {why}"
        return f"compared the {calls:,} collectives of {groups} groups, and each message with its receive"

    def _shard_lines(self) -> Iterator[str]:
        """Yield lines that state how many checkpoint bytes the ranks write."""
        sizes = {record.rank: written_bytes(record.boxes) for record in self.records if record.failure is None}
        if sizes:
            least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
            ends = f"rank {most} writes most, {byte_text(sizes[most])}, rank {least} least, {byte_text(sizes[least])}"
            yield f"checkpoint: {ends}"
        if self._covered:
            yield f"checkpoint of all ranks: {byte_text(sum(sizes.values()))}, each element written once"
        elif sizes and len(sizes) < self.rehearsal.world_size:
            yield "checkpoint: it is unknown whether the ranks together write all elements; --ranks all checks this"

    @property
    def _covered(self) -> bool | None:
        """Return True if the ranks write each element of a checkpoint exactly once; None if this is unknown."""
        whole = sum(record.failure is None for record in self.records) == self.rehearsal.world_size
        return not coverage_problems(self.records, True) if whole else None

    @property
    def _device(self) -> str:
        return "CPU" if device_of(self.rehearsal.config) == "cpu" else "GPU"

    def verdict(self) -> Iterator[str]:
        """Yield lines that list the problems and the ranks without a record, or a line that says that no problem was
        found."""
        if self.lost:
            yield "Not rehearsed:"
            yield from (f"  {line}" for line in _lost_lines(self.lost))
        if self.problems:
            yield "A run would fail:"
            yield from (f"  {line}" for line in self.problems)
        elif not self.lost:
            agree = compared(self.records)[0] > 0
            yield "No rank fails, and their collectives agree." if agree else "No rank fails; nothing was compared."

    def as_object(self) -> dict[str, object]:
        """Return the report as the object that --json writes."""
        rehearsal, records = self.rehearsal, self.records
        groups, calls = compared(records)
        return {
            "world_size": rehearsal.world_size,
            "microbatches": rehearsal.microbatches,
            "microbatches_rehearsed": rehearsal.rehearsed,
            "device": self._device,
            "config": flat_values(self.config),
            "ranks": [self._rank(record) for record in records],
            "not_rehearsed": [{"rank": each.job, "ended_by": each.how} for each in self.lost],
            "compared": {"groups": groups, "calls": calls},
            "checkpoint_complete": self._covered,
            "notes": list(self.notes),
            "problems": list(self.problems),
            "fails": bool(self.problems),
        }

    def _rank(self, record: RankRecord) -> dict[str, object]:
        failure, sent = record.failure, self._sent_by_axis(record)
        return {
            "rank": record.rank,
            "coordinates": record.coords,
            "built_bytes": record.built,
            "peak_bytes": record.peak,
            "peak_at": record.peak_phase,
            "planned_bytes": self._planned(record),
            "host_bytes": record.host,
            "checkpoint_bytes": written_bytes(record.boxes),
            "sent": {axis: {"calls": calls, "bytes": size} for axis, (calls, size) in sent.items()},
            "failure": None if failure is None else asdict(failure),
            "processor_seconds": round(record.seconds, 3),
        }


def _lost_lines(lost: Sequence[Lost]) -> Iterator[str]:
    by_how: dict[str, list[int]] = defaultdict(list)
    for each in lost:
        by_how[each.how].append(each.job)
    for how, ranks in by_how.items():
        what = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
        if how.startswith("exit code"):
            yield f"{what}the process ended with {how}, but without an exception"
        else:
            remedy = "use fewer cores (taskset -c 0), or name fewer ranks (--ranks)"
            yield f"{what}ended by {how}; if this machine has too little memory, {remedy}"


def problem_lines(records: Sequence[RankRecord], world_size: int) -> list[str]:
    """Return all problems that would make a run fail; the result is empty if no problem was found."""
    lines: list[str] = []
    failed: dict[tuple[str, str, tuple[str, ...]], list[RankRecord]] = defaultdict(list)
    for record in records:
        if (failure := record.failure) is not None:
            failed[failure.kind, failure.message, failure.sites[:1]].append(record)
    for same in failed.values():
        others = f", and {len(same) - 1} more: {', '.join(str(record.rank) for record in same[1:9])}"
        failure = same[0].failure
        assert failure is not None
        lines += [f"{same[0].name()} failed in {failure.phase}{others if len(same) > 1 else ''}", *_failure(failure)]
    for mismatch in mismatches(records):
        lines += mismatch
    return lines + [f"checkpoint: {line}" for line in coverage_problems(records, len(records) == world_size)]


def _failure(failure: Failure) -> Iterator[str]:
    first, *notes = failure.message.splitlines() or [""]
    yield f"  {failure.kind}: {first}"
    yield from (f"  {note}" for note in notes)
    yield from (f"  {'at' if not number else 'by'} {site}" for number, site in enumerate(failure.sites[:SITES_SHOWN]))
    for holder in failure.holders:
        yield f"  {byte_text(holder.nbytes)} in {holder.tensors} tensors made at {holder.site or 'an unknown place'}"
