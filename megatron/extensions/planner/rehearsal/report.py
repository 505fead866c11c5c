"""The report of a rehearsal: what ended ranks, where their collectives part, memory, and bytes sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.extensions.planner.rehearsal.fake_rank import LostRank, Rehearsal, device_of
from megatron.extensions.planner.rehearsal.matching import compared, coverage_problems, mismatches, written_bytes
from megatron.extensions.planner.rehearsal.record import Failure, RankRecord, bytes_sent
from megatron.training.config.batch_size import byte_text
from megatron.training.config.flags import flat_values
from megatron.training.config.run_config import RunConfig

SITES_SHOWN = 4


@dataclass(frozen=True)
class Report:
    """What a rehearsal has found."""

    config: RunConfig
    """Of the run."""

    rehearsal: Rehearsal
    records: Sequence[RankRecord]
    lost: Sequence[LostRank]
    """Ranks whose processes ended without a record: nothing is known of them."""

    planned: Mapping[int, int]
    """Bytes by pipeline rank, as `--dry-run` plans them."""

    notes: Sequence[str]
    problems: Sequence[str]
    """Everything that a run would fail of."""

    def lines(self) -> Iterator[str]:
        """What was rehearsed, memory by rank, and traffic by axis."""
        records, rehearsed, microbatches = self.records, self.rehearsal.rehearsed, self.rehearsal.microbatches
        shown = f"{rehearsed} of {microbatches}" if rehearsed < microbatches else str(microbatches)
        ranks = f"{len(records)} of {self.rehearsal.world_size} ranks"
        yield f"Rehearsal of {ranks}, {shown} micro-batches, on fake tensors"
        if records:
            yield f"Memory of a {self._device}"
            yield from (f"  {line}" for line in memory_lines(records, self.planned))
            yield f"Sent in a step of {microbatches} micro-batches"
            yield from (f"  {line}" for line in traffic_lines(records, rehearsed, microbatches))
            yield compared_line(records, self.rehearsal.world_size)
            yield from shard_lines(records, self.rehearsal.world_size)
        yield from self.notes

    @property
    def _device(self) -> str:
        return "CPU" if device_of(self.rehearsal.config) == "cpu" else "GPU"

    def verdict(self) -> Iterator[str]:
        """Problems, ranks of which nothing is known, or that nothing was found."""
        if self.lost:
            yield "Not rehearsed:"
            yield from (f"  {line}" for line in _lost_lines(self.lost))
        if self.problems:
            yield "A run would fail:"
            yield from (f"  {line}" for line in self.problems)
        elif not self.lost:
            agree = compared(self.records)[0] > 0
            yield "No rank fails, and their collectives agree." if agree else "No rank fails; nothing was compared."

    def as_object(self) -> dict[str, Any]:
        """The report for --json."""
        rehearsal, records = self.rehearsal, self.records
        groups, calls = compared(records)
        return {
            "world_size": rehearsal.world_size,
            "microbatches": rehearsal.microbatches,
            "microbatches_rehearsed": rehearsal.rehearsed,
            "device": self._device,
            "config": flat_values(self.config),
            "ranks": [self._rank(record) for record in records],
            "not_rehearsed": [{"rank": each.rank, "ended_by": each.how} for each in self.lost],
            "compared": {"groups": groups, "calls": calls},
            "checkpoint_complete": covered(records, rehearsal.world_size),
            "notes": list(self.notes),
            "problems": list(self.problems),
            "fails": bool(self.problems),
        }

    def _rank(self, record: RankRecord) -> dict[str, Any]:
        rehearsal, failure = self.rehearsal, record.failure
        sent = sent_by_axis(record, rehearsal.rehearsed, rehearsal.microbatches)
        return {
            "rank": record.rank,
            "coordinates": record.coords,
            "built_bytes": record.built,
            "peak_bytes": record.peak,
            "peak_at": record.peak_phase,
            "planned_bytes": self.planned.get(record.coords.get("pp", 0)),
            "host_bytes": record.host,
            "checkpoint_bytes": written_bytes(record.boxes),
            "sent": {axis: {"calls": calls, "bytes": size} for axis, (calls, size) in sent.items()},
            "failure": None if failure is None else asdict(failure),
            "processor_seconds": round(record.seconds, 3),
        }


def _lost_lines(lost: Sequence[LostRank]) -> Iterator[str]:
    by_how: dict[str, list[int]] = defaultdict(list)
    for each in lost:
        by_how[each.how].append(each.rank)
    for how, ranks in by_how.items():
        what = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
        if how.startswith("exit code"):
            yield f"{what}something ended the process with {how}, without an exception"
        else:
            remedy = "use fewer cores (taskset -c 0), or name fewer ranks (--ranks)"
            yield f"{what}ended by {how}; if this machine has too little memory, {remedy}"


def sent_by_axis(record: RankRecord, rehearsed: int, microbatches: int) -> dict[str, tuple[int, int]]:
    """(calls, bytes sent) of a step of `microbatches` by axis. Those that were not rehearsed send what one in the
    middle of the rehearsal does."""
    calls, sizes = Counter[str](), Counter[str]()
    for each in record.collectives:
        axis = record.axes.get(each.group, "user's")
        times = 1 + (microbatches - rehearsed) * (each.microbatch == rehearsed // 2)
        calls[axis] += times
        sizes[axis] += times * bytes_sent(each, record.rank)
    return {axis: (calls[axis], sizes[axis]) for axis in calls}


def problem_lines(records: Sequence[RankRecord], world_size: int) -> list[str]:
    """Everything that a run would fail of; empty if nothing was found."""
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
        lines += mismatch.lines()
    return lines + [f"checkpoint: {line}" for line in coverage_problems(records, len(records) == world_size)]


def _failure(failure: Failure) -> Iterator[str]:
    first, *notes = failure.message.splitlines() or [""]
    yield f"  {failure.kind}: {first}"
    yield from (f"  {note}" for note in notes)
    yield from (f"  {'at' if not number else 'by'} {site}" for number, site in enumerate(failure.sites[:SITES_SHOWN]))
    for holder in failure.holders:
        yield f"  {byte_text(holder.nbytes)} in {holder.tensors} tensors made at {holder.site or 'an unknown place'}"


def memory_lines(records: Sequence[RankRecord], planned: Mapping[int, int]) -> Iterator[str]:
    """A line for each rank: memory when it was built, at the peak, and as planned for its pipeline rank."""
    width = max(len(record.name()) for record in records)
    yield f"{'':<{width}}{'built':>12}{'peak':>12}{'planned':>12}  at the peak"
    for record in records:
        plan = planned.get(record.coords.get("pp", 0))
        shown = (record.built, record.peak, plan)
        text = "".join(f"{'' if size is None else byte_text(size):>12}" for size in shown)
        host = f"; {byte_text(record.host)} in host memory" if record.host else ""
        yield f"{record.name():<{width}}{text}  {record.peak_phase}{host}"


def traffic_lines(records: Sequence[RankRecord], rehearsed: int, microbatches: int) -> Iterator[str]:
    """A line for each axis: calls and bytes of the rank that sends most in a step."""
    most: dict[str, tuple[int, int, RankRecord]] = {}
    for record in records:
        for axis, (calls, size) in sent_by_axis(record, rehearsed, microbatches).items():
            if axis not in most or (size, calls) > (most[axis][1], most[axis][0]):
                most[axis] = calls, size, record
    yield f"{'axis':<20}{'calls':>10}{'sent':>14}  by"
    for axis, (calls, size, record) in sorted(most.items(), key=lambda item: -item[1][1]):
        yield f"{axis:<20}{calls:>10,}{byte_text(size):>14}  {record.name()}"


def shard_lines(records: Sequence[RankRecord], world_size: int) -> Iterator[str]:
    """What ranks write of a checkpoint, and what is known of all of it."""
    sizes = {record.rank: written_bytes(record.boxes) for record in records if record.failure is None}
    if sizes:
        least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        ends = f"rank {most} writes most, {byte_text(sizes[most])}, rank {least} least, {byte_text(sizes[least])}"
        yield f"checkpoint: {ends}"
    if covered(records, world_size):
        yield f"checkpoint of all ranks: {byte_text(sum(sizes.values()))}, each element written once"
    elif sizes and len(sizes) < world_size:
        yield "checkpoint: whether all ranks together leave elements out is not known; --ranks all compares them"


def covered(records: Sequence[RankRecord], world_size: int) -> bool | None:
    """Whether the ranks write each element of a checkpoint once; None where that is not known."""
    whole = sum(record.failure is None for record in records) == world_size
    return not coverage_problems(records, True) if whole else None


def compared_line(records: Sequence[RankRecord], world_size: int) -> str:
    """How many collectives were compared, or why none could be."""
    groups, calls = compared(records)
    if not groups:
        alone = "no two of the rehearsed ranks call any together; --ranks all-distinct compares them"
        return f"no collectives could be compared: {alone if world_size > 1 else 'the run has one rank'}"
    return f"collectives of {groups} groups compared, {calls:,} calls; each message with its receive"
