"""The report of a rehearsal: what ended ranks, where their collectives part, memory, and bytes sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megatron.planner.rehearsal.matching import compared, mismatches
from megatron.planner.rehearsal.record import Failure, RankRecord, bytes_sent
from megatron.planner.rehearsal.shards import coverage_problems, written_bytes
from megatron.training.config.dry_run.memory import byte_text

SITES_SHOWN = 4


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
    """What ranks write of a checkpoint."""
    sizes = {record.rank: written_bytes(record.boxes) for record in records if record.failure is None}
    if sizes:
        least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        ends = f"rank {most} writes most, {byte_text(sizes[most])}, rank {least} least, {byte_text(sizes[least])}"
        yield f"checkpoint: {ends}"
    if len(sizes) == world_size:
        yield f"checkpoint of all ranks: {byte_text(sum(sizes.values()))}"


def compared_line(records: Sequence[RankRecord]) -> str:
    groups, calls = compared(records)
    return f"collectives of {groups} groups compared, {calls:,} calls; each message with its receive"
