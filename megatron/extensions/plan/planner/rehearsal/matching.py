"""Comparison of the collectives of rehearsed ranks, and of the checkpoint parts that they write. This module does not
import torch.

All ranks of a group must call the same collectives in the same order. Each message needs a matching receive of the same
size on the other rank. The messages between two ranks of a group must be sent and received in the same order, because
NCCL ignores tags. The parts of a checkpoint that all ranks write must together cover each tensor exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import NamedTuple

from megatron.core.boxes import overlap
from megatron.core.parallel_dims import ParallelDims

POINT_TO_POINT = ("send", "recv")


class Group(NamedTuple):
    """A process group.

    A group is identified by its members and the number of earlier groups with the same members. All ranks know these
    values, so no communication is needed to identify a group.
    """

    ranks: tuple[int, ...]
    ordinal: int = 0


class Splits(NamedTuple):
    """Numbers of elements that an all-to-all sends to and receives from each rank of the group; empty if all numbers
    are equal."""

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Collective(NamedTuple):
    """Collective or message, as seen by the calling rank."""

    op: str
    """Name of the operation, such as "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"
    or "recv"."""

    group: Group
    dtype: str
    sent: int
    """Number of elements in the input of the collective."""

    received: int
    """Number of elements in the result of the collective."""

    reduce: str = ""
    """Name of the reduction operation, such as "sum" or "max"; empty if the operation does not reduce."""

    peer: int = -1
    """Global rank of the other side: the root of a collective, the receiver of a send, or the sender of a receive."""

    tag: int = 0
    splits: Splits = Splits()
    site: str = ""
    """File and line of the caller, outside torch and the wrappers of collectives."""

    phase: str = ""
    """Phase in which the rank makes the call, such as "F of stage 3, micro-batch 0"."""

    microbatch: int = -1
    """Number of the micro-batch; -1 outside of forward and backward passes."""

    itemsize: int = 0
    """Bytes per element."""

    @property
    def agreed(self) -> tuple[object, ...]:
        """Return the properties of a call on which all ranks of the group must agree."""
        if self.op in ("gather", "scatter"):  # only the root has the whole tensor, so compare the size of a part
            return self.op, self.dtype, min(self.sent or self.received, self.received or self.sent), self.peer
        sizes = () if self.op == "all_to_all" else (self.sent, self.received)
        return self.op, self.dtype, self.reduce, self.peer, *sizes

    def __str__(self) -> str:
        count = f" of {self.sent or self.received:,} {self.dtype}" if self.dtype else ""
        to = {"send": " to rank {}", "recv": " from rank {}"}.get(self.op, " of rank {}").format(self.peer)
        reduce = f" ({self.reduce})" if self.reduce not in ("", "sum") else ""
        return f"{self.op}{reduce}{count}{to if self.peer >= 0 else ''}"


def bytes_sent(collective: Collective, rank: int) -> int:
    """Return the number of bytes that `rank` sends. The number is based on two assumptions: the collective uses the
    algorithm with the least traffic, and all ranks send equal amounts.

    All-reduces, all-gathers and reduce-scatters use rings.
    """
    n, size = len(collective.group.ranks), collective.sent * collective.itemsize
    if collective.op == "all_to_all" and collective.splits.sent:
        own = collective.splits.sent[collective.group.ranks.index(rank)]
        return (collective.sent - own) * collective.itemsize
    if collective.op in ("broadcast", "scatter"):
        return size if rank == collective.peer else 0
    part, whole = (n - 1, n), (1, 1)
    factors = {"all_reduce": (2 * (n - 1), n), "reduce_scatter": part, "all_to_all": part, "all_gather": (n - 1, 1)}
    up, down = (factors | {"send": whole, "reduce": whole, "gather": whole}).get(collective.op, (0, 1))
    return size * up // down


class Box(NamedTuple):
    """Part of a checkpoint tensor that a rank writes."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Holder:
    """Total memory of the tensors that were created at one code location (`site`)."""

    nbytes: int
    tensors: int
    site: str


@dataclass(frozen=True)
class Failure:
    """Failure that ended the rehearsal of a rank."""

    kind: str
    """Class of the exception."""

    message: str
    phase: str
    sites: tuple[str, ...]
    """Code locations of the traceback that are outside torch, innermost first."""

    holders: tuple[Holder, ...] = ()
    """Code locations whose tensors hold the most memory; empty unless memory ran out."""


@dataclass
class RankRecord:
    """Record of the rehearsal of one rank."""

    rank: int
    coords: dict[str, int]
    axes: dict[Group, str] = field(default_factory=dict)
    """Axis name of each process group of the layout."""

    collectives: list[Collective] = field(default_factory=list)
    built: int = 0
    """Number of bytes held after the run was built."""

    peak: int = 0
    peak_phase: str = ""
    host: int = 0
    """Bytes of the host buffers for offloaded tensors."""

    boxes: list[Box] = field(default_factory=list)
    """Parts of a checkpoint's tensors that the rank writes."""

    failure: Failure | None = None
    seconds: float = 0.0
    """Processor time that the rehearsal took."""

    def name(self) -> str:
        """Return the rank's name with its coordinates along the axes with more than one rank, such as `rank 8 (pp 1, dp
        0, tp 0)`."""
        coords = ", ".join(f"{axis} {value}" for axis, value in self.coords.items())
        return f"rank {self.rank} ({coords})" if coords else f"rank {self.rank}"


DISTINCT = "all-distinct"

AXES = (("pp", "dp", "cp", "tp"), ("pp", "expt_dp", "ep", "expt_tp"))


def distinct_ranks(dims: ParallelDims) -> list[int]:
    """Select the ranks to rehearse, so that every kind of rank that may behave differently is represented.

    Every pipeline rank is included, because pipeline ranks differ in their action lists and layers. For the first and
    the last pipeline rank, the first and the last rank along each other axis are included. Code may treat the ends of
    an axis differently. For example, only the first rank reports, the last shard of a buffer may be shorter, and a
    context-parallel ring wraps around at its last rank.
    """
    found = {dims.rank(pp=pp) for pp in range(dims.pp)}
    for pp in {0, dims.pp - 1}:
        for order in AXES:
            for axis in order[1:]:
                found.add(dims.rank(pp=pp, **{axis: dims.size(axis) - 1}))
            found.add(dims.rank(pp=pp, **{axis: dims.size(axis) - 1 for axis in order[1:]}))
    return sorted(found)


def chosen_ranks(text: str, dims: ParallelDims) -> list[int]:
    """Parse --ranks: "all-distinct", "all", or numbers and ranges such as 0,8,1016-1023. Raises ValueError if the text
    has another form or a rank does not exist."""
    if text == DISTINCT:
        return distinct_ranks(dims)
    if text == "all":
        return list(range(dims.world_size))
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not (first.isdigit() and (last.isdigit() if dash else not last)):
            raise ValueError(f"--ranks {text}: {word!r} is no rank; give {DISTINCT}, all, or ranks such as 0,8,16-23")
        ranks = range(int(first), int(last or first) + 1)
        if not ranks:
            raise ValueError(f"--ranks {text}: {word} ends before it begins; put the lower rank first")
        if ranks[-1] >= dims.world_size:
            raise ValueError(
                f"--ranks {text}: {word} must be in 0 to {dims.world_size - 1}; raise --world-size, or remove it"
            )
        found.update(ranks)
    return sorted(found)


def coords_of(rank: int, dims: ParallelDims) -> dict[str, int]:
    """Return a rank's coordinates along all parallel axes with more than one rank."""
    coords = dims.coords(rank)
    axes = ["pp", "dp", "cp", "tp"] + (["ep", "expt_dp", "expt_tp"] if dims.ep > 1 or dims.expt_tp != dims.tp else [])
    return {axis: coords[axis] for axis in axes if dims.size(axis) > 1}


Side = tuple[RankRecord, list[Collective]]
"""One side of a comparison: a rank with its collectives in a group, or with its messages to or from one other rank."""


def _parted(group: Group, axis: str, number: int, sides: tuple[Side, Side], what: str) -> list[str]:
    """Return the lines that report the first difference between two ranks of a group, after `number` equal calls.
    `what` describes the difference and its consequence for a run."""
    ranks = group.ranks
    shown = ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]},{ranks[1]},...,{ranks[-1]}"
    told = [f"  {record.name()}: {_told(calls[number : number + 1])}" for record, calls in sides]
    return [f"{axis} group [{shown}], call {number + 1}: {what}", *told]


def _told(collectives: Sequence[Collective]) -> str:
    for each in collectives:
        return f"{each} at {each.site or 'an unknown place'}, in {each.phase}"
    return "makes no further call"


def mismatches(records: Sequence[RankRecord]) -> list[list[str]]:
    """Return reports of the collectives and messages on which ranks disagree. Each report is a list of lines. There is
    at most one report for each group, and for each direction of messages between two ranks. Failed ranks are excluded
    from the comparison."""
    records = [record for record in records if record.failure is None]
    axes = {group: axis for record in records for group, axis in record.axes.items()}
    joint: dict[Group, dict[int, list[Collective]]] = defaultdict(dict)
    of_rank = {record.rank: record for record in records}
    messages: dict[tuple[Group, int, int], tuple[list[Collective], list[Collective]]] = defaultdict(lambda: ([], []))
    for record in records:
        for group in {*record.axes, *(each.group for each in record.collectives)}:
            if record.rank in group.ranks:
                joint[group].setdefault(record.rank, [])
        for each in record.collectives:
            if each.op == "send":
                messages[each.group, record.rank, each.peer][0].append(each)
            elif each.op == "recv":
                messages[each.group, each.peer, record.rank][1].append(each)
            else:
                joint[each.group].setdefault(record.rank, []).append(each)
    found: list[list[str]] = []
    for group, by_rank in joint.items():
        axis = axes.get(group, "user's")
        for rank in by_rank.keys() - set(group.ranks):
            record, text = of_rank[rank], "a rank calls a collective of a group that it does not belong to"
            found.append(_parted(group, axis, 0, ((record, by_rank[rank]), (record, [])), text))
        members = [rank for rank in sorted(by_rank) if rank in group.ranks]
        for rank in members[1:]:
            pair = (of_rank[members[0]], by_rank[members[0]]), (of_rank[rank], by_rank[rank])
            if (mismatch := _first_difference(group, axis, *pair)) is not None:
                found.append(mismatch)
                break
    for (group, sender, receiver), (out, into) in sorted(messages.items()):
        if sender in of_rank and receiver in of_rank:
            pair = (of_rank[sender], out), (of_rank[receiver], into)
            if (mismatch := _message_difference(group, axes.get(group, "user's"), *pair)) is not None:
                found.append(mismatch)
    return found


def _first_difference(group: Group, axis: str, left: Side, right: Side) -> list[str] | None:
    (one, a), (other, b) = left, right
    places = group.ranks.index(one.rank), group.ranks.index(other.rank)
    pairs = enumerate(zip_longest(a, b))
    bad = next((k for k, (x, y) in pairs if x is None or y is None or not _fits(x, y, *places)), None)
    if bad is None:
        return None
    # If one rank skips a call, its next calls may still equal those of the other rank. The first pair of calls with
    # different call sites is therefore reported.
    bad = next((k for k in range(bad) if a[k].site != b[k].site), bad)
    return _parted(group, axis, bad, (left, right), _what(a, b, bad))


def _what(a: Sequence[Collective], b: Sequence[Collective], bad: int) -> str:
    hang = "the ranks of this group would wait for each other forever"
    if bad >= min(len(a), len(b)):
        return f"one rank makes {len(a)} calls and another {len(b)}; {hang}"
    x, y = a[bad], b[bad]
    if x.op == y.op and x.site == y.site:
        return "the sizes, types or roots differ; a run would fail, hang or compute with wrong values"
    return f"the calls differ; {hang}, or compute with wrong values"


def _fits(x: Collective, y: Collective, place: int, other: int) -> bool:
    """Return True if two ranks, at the given positions of the group, call the same collective."""
    if x.agreed != y.agreed:
        return False
    if x.op != "all_to_all":
        return True
    return _sent_to(x, other) == _received_from(y, place) and _sent_to(y, place) == _received_from(x, other)


def _sent_to(each: Collective, place: int) -> int:
    return each.splits.sent[place] if each.splits.sent else each.sent // len(each.group.ranks)


def _received_from(each: Collective, place: int) -> int:
    return each.splits.received[place] if each.splits.received else each.received // len(each.group.ranks)


def _message_difference(group: Group, axis: str, sender: Side, receiver: Side) -> list[str] | None:
    for number, (x, y) in enumerate(zip_longest(sender[1], receiver[1])):
        if x is None or y is None:
            return _parted(
                group,
                axis,
                number,
                (sender, receiver),
                "a message has no matching send or receive on the other rank; a run would hang",
            )
        if (x.sent, x.dtype, x.tag) != (y.received, y.dtype, y.tag):
            return _parted(group, axis, number, (sender, receiver), "a message differs from what the receiver expects")
    return None


def compared(records: Sequence[RankRecord]) -> tuple[int, int]:
    """Return (number of groups with two or more rehearsed ranks, number of compared calls)."""
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
    """Return the number of bytes that a rank writes to a checkpoint."""
    return sum(prod(box.shape) * box.itemsize for box in boxes)


def coverage_problems(records: Sequence[RankRecord], every_rank: bool) -> list[str]:
    """Return a problem if two ranks write the same elements of a tensor.

    If `every_rank` is True, the records cover all ranks, so elements that no rank writes are also reported as problems.
    If the rehearsal of any rank failed, the result is empty.
    """
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
            found.append(f"{key}: {twice[0].name()} and {twice[1].name()} write the same elements")
        elif every_rank and sum(prod(box.shape) for _, box in written) < prod(written[0][1].global_shape):
            found.append(f"{key} {written[0][1].global_shape}: no rank writes all of its elements")
    more = len(found) - PROBLEMS_SHOWN
    return [*found[:PROBLEMS_SHOWN], f"and {more} more tensors"] if more > 0 else found


def _overlap(written: Sequence[tuple[RankRecord, Box]]) -> tuple[RankRecord, RankRecord] | None:
    """Return the first two ranks that write overlapping parts (boxes) of a tensor."""
    ordered = sorted(written, key=lambda each: each[1].offset)
    for number, (record, box) in enumerate(ordered):
        end = box.offset[0] + box.shape[0] if box.shape else 1
        for other, later in ordered[number + 1 :]:
            if later.shape and later.offset[0] >= end:
                break
            if overlap(box.offset, box.shape, later.offset, later.shape) is not None:
                return record, other
    return None
