"""Compares rehearsed ranks: their collectives, and what they write of a checkpoint. No torch.

The collectives of one group must be the same, in one order. A message needs its receive at the other end, of the same
size, and messages of two ranks over one group must be sent and received in one order, as NCCL ignores tags. The boxes
that all ranks write must cover each tensor once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megatron.core.boxes import overlap
from megatron.extensions.planner.rehearsal.record import POINT_TO_POINT, Box, Collective, Group, RankRecord


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group at which two of its ranks differ; None for a rank that has ended."""

    group: Group
    axis: str
    number: int
    """Collectives of the group before it."""

    first: tuple[RankRecord, Collective | None]
    second: tuple[RankRecord, Collective | None]
    what: str
    """What a run would do."""

    def lines(self) -> list[str]:
        """The report of it."""
        ranks = self.group.ranks
        shown = ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]},{ranks[1]},...,{ranks[-1]}"
        sides = [f"  {record.name()}: {_told(found)}" for record, found in (self.first, self.second)]
        return [f"{self.axis} group [{shown}], call {self.number + 1}: {self.what}", *sides]


def _told(collective: Collective | None) -> str:
    if collective is None:
        return "makes no further call"
    return f"{collective} at {collective.site or 'an unknown place'}, in {collective.phase}"


def mismatches(records: Sequence[RankRecord]) -> list[Mismatch]:
    """At most one for each group, or for each direction between two ranks of it. Ranks that failed are left out."""
    records = [record for record in records if record.failure is None]
    axes = {group: axis for record in records for group, axis in record.axes.items()}
    joint: dict[Group, dict[int, list[Collective]]] = defaultdict(dict)
    of_rank = {record.rank: record for record in records}
    sends: dict[tuple[Group, int, int], list[Collective]] = defaultdict(list)
    receives: dict[tuple[Group, int, int], list[Collective]] = defaultdict(list)
    for record in records:
        for group in {*record.axes, *(each.group for each in record.collectives)}:
            if record.rank in group.ranks:
                joint[group].setdefault(record.rank, [])
        for each in record.collectives:
            if each.op == "send":
                sends[each.group, record.rank, each.peer].append(each)
            elif each.op == "recv":
                receives[each.group, each.peer, record.rank].append(each)
            else:
                joint[each.group].setdefault(record.rank, []).append(each)
    found: list[Mismatch] = []
    for group, by_rank in joint.items():
        axis = axes.get(group, "user's")
        outside = [rank for rank in by_rank if rank not in group.ranks]
        members = [rank for rank in sorted(by_rank) if rank in group.ranks]
        for rank in outside:
            record = of_rank[rank]
            text = "a rank calls a group that it is not in"
            found.append(Mismatch(group, axis, 0, (record, by_rank[rank][0]), (record, None), text))
        for rank in members[1:]:
            pair = (of_rank[members[0]], by_rank[members[0]]), (of_rank[rank], by_rank[rank])
            if (mismatch := _first_difference(group, axis, *pair)) is not None:
                found.append(mismatch)
                break
    for group, sender, receiver in sorted({*sends, *receives}):
        if sender in of_rank and receiver in of_rank:
            key = group, sender, receiver
            out, into = sends.get(key, []), receives.get(key, [])
            mismatch = _message_difference(
                group, axes.get(group, "user's"), (of_rank[sender], out), (of_rank[receiver], into)
            )
            if mismatch is not None:
                found.append(mismatch)
    return found


Side = tuple[RankRecord, list[Collective]]


def _first_difference(group: Group, axis: str, left: Side, right: Side) -> Mismatch | None:
    (one, a), (other, b) = left, right
    places = group.ranks.index(one.rank), group.ranks.index(other.rank)
    bad = next((k for k, pair in enumerate(zip(a, b, strict=False)) if not _fits(*pair, *places)), None)
    if bad is None and len(a) == len(b):
        return None
    bad = min(len(a), len(b)) if bad is None else bad
    # Equal calls may hide that one was left out before: the place where call sites part is where it was.
    bad = next((k for k in range(bad) if a[k].site != b[k].site), bad)
    x, y = (calls[bad] if bad < len(calls) else None for calls in (a, b))
    return Mismatch(group, axis, bad, (one, x), (other, y), _what(a, b, bad))


def _what(a: Sequence[Collective], b: Sequence[Collective], bad: int) -> str:
    hang = "the ranks of this group would wait for each other for ever"
    if bad >= min(len(a), len(b)):
        return f"one rank makes {len(a)} calls and another {len(b)}; {hang}"
    x, y = a[bad], b[bad]
    if x.op == y.op and x.site == y.site:
        return "the sizes, types or roots differ; a run would fail, hang or compute with wrong values"
    return f"the calls differ; {hang}, or compute with wrong values"


def _fits(x: Collective, y: Collective, place: int, other: int) -> bool:
    """Whether two ranks at these places of the group call the same collective."""
    if x.agreed != y.agreed:
        return False
    if x.op != "all_to_all":
        return True
    n = len(x.group.ranks)
    return _part(x.sent, x.splits.sent, other, n) == _part(y.received, y.splits.received, place, n) and _part(
        y.sent, y.splits.sent, place, n
    ) == _part(x.received, x.splits.received, other, n)


def _part(total: int, splits: Sequence[int], place: int, size: int) -> int:
    return splits[place] if splits else total // size


def _message_difference(group: Group, axis: str, sender: Side, receiver: Side) -> Mismatch | None:
    (one, out), (other, into) = sender, receiver
    for number in range(max(len(out), len(into))):
        x, y = (calls[number] if number < len(calls) else None for calls in (out, into))
        if x is None or y is None:
            return Mismatch(group, axis, number, (one, x), (other, y), "a message has no other end; a run would hang")
        if (x.sent, x.dtype, x.tag) != (y.received, y.dtype, y.tag):
            return Mismatch(group, axis, number, (one, x), (other, y), "a message is not the one that is received")
    return None


def compared(records: Sequence[RankRecord]) -> tuple[int, int]:
    """(groups of which two or more ranks were rehearsed, calls of theirs that were compared)."""
    by_group: dict[Group, list[int]] = defaultdict(list)
    for record in records:
        counts: dict[Group, int] = defaultdict(int)
        for each in record.collectives:
            counts[each.group] += each.op not in POINT_TO_POINT
        for group, count in counts.items():
            by_group[group].append(count)
    shared = [counts for counts in by_group.values() if len(counts) > 1]
    return len(shared), sum(map(sum, shared))


PROBLEMS_SHOWN = 4


def written_bytes(boxes: Sequence[Box]) -> int:
    """Bytes of the boxes of a rank."""
    return sum(prod(box.shape) * box.itemsize for box in boxes)


def coverage_problems(records: Sequence[RankRecord], every_rank: bool) -> list[str]:
    """Elements that two ranks write, and with `every_rank`, whose records these are, elements that none does. A rank
    that failed writes nothing, and then nothing is judged."""
    if any(record.failure is not None for record in records):
        return []
    by_key: dict[str, list[tuple[RankRecord, Box]]] = defaultdict(list)
    for record in records:
        for box in record.boxes:
            by_key[box.key].append((record, box))
    found: list[str] = []
    for key, written in by_key.items():
        shapes = {box.global_shape for _, box in written}
        if len(shapes) > 1:
            found.append(f"{key} has the shapes {' and '.join(map(str, sorted(shapes)))} on different ranks")
            continue
        if (twice := _overlap(written)) is not None:
            found.append(f"{key}: {twice[0].name()} and {twice[1].name()} both write elements of it")
        elif every_rank and sum(prod(box.shape) for _, box in written) < prod(written[0][1].global_shape):
            found.append(f"{key} {written[0][1].global_shape}: no rank writes all of its elements")
    more = len(found) - PROBLEMS_SHOWN
    return [*found[:PROBLEMS_SHOWN], f"and {more} more tensors"] if more > 0 else found


def _overlap(written: Sequence[tuple[RankRecord, Box]]) -> tuple[RankRecord, RankRecord] | None:
    """The first two ranks whose boxes have an element in common."""
    ordered = sorted(written, key=lambda each: each[1].offset)
    for number, (record, box) in enumerate(ordered):
        end = box.offset[0] + box.shape[0] if box.shape else 1
        for other, later in ordered[number + 1 :]:
            if later.shape and later.offset[0] >= end:
                break
            if overlap(box.offset, box.shape, later.offset, later.shape) is not None:
                return record, other
    return None
