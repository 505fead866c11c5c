"""What one rehearsed rank did: its collectives in order, its memory, and what ended it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

POINT_TO_POINT = ("send", "recv")


class Group(NamedTuple):
    """A process group. Ranks agree on its identity without talking: its members, and how many groups of the same
    members were made before it."""

    ranks: tuple[int, ...]
    ordinal: int = 0


class Splits(NamedTuple):
    """Elements of an all-to-all by rank of the group; empty where all are equal."""

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Collective(NamedTuple):
    """One collective or message, as the rank that calls it sees it."""

    op: str
    """ "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", ..."""

    group: Group
    dtype: str
    sent: int
    """Elements handed in."""

    received: int
    """Elements of the result."""

    reduce: str = ""
    """ "sum", "max", ... of a reduction."""

    peer: int = -1
    """Rank in the world of the root, of the receiver of a send, or of the sender of a receive."""

    tag: int = 0
    splits: Splits = Splits()
    site: str = ""
    """File and line of the caller, outside of torch and of wrappers of collectives."""

    phase: str = ""
    """What the rank was doing, such as "F of stage 3, micro-batch 0"."""

    microbatch: int = -1
    """Number of the micro-batch; -1 outside of forward and backward passes."""

    itemsize: int = 0
    """Bytes of an element."""

    @property
    def agreed(self) -> tuple[object, ...]:
        """What all ranks of the group must have in common."""
        if self.op in ("gather", "scatter"):  # the root has the whole
            return self.op, self.dtype, min(self.sent or self.received, self.received or self.sent), self.peer
        sizes = () if self.op == "all_to_all" else (self.sent, self.received)
        return self.op, self.dtype, self.reduce, self.peer, *sizes

    def __str__(self) -> str:
        count = f" of {self.sent or self.received:,} {self.dtype}" if self.dtype else ""
        to = {"send": " to rank {}", "recv": " from rank {}"}.get(self.op, " of rank {}").format(self.peer)
        reduce = f" ({self.reduce})" if self.reduce not in ("", "sum") else ""
        return f"{self.op}{reduce}{count}{to if self.peer >= 0 else ''}"


def bytes_sent(collective: Collective, rank: int) -> int:
    """Bytes that `rank` sends, by the algorithm that sends least where each rank sends as much: rings for all-reduces,
    all-gathers and reduce-scatters."""
    n, itemsize = len(collective.group.ranks), collective.itemsize
    size = collective.sent * itemsize
    if collective.op == "all_to_all":
        if not collective.splits.sent:
            return size * (n - 1) // n
        return (collective.sent - collective.splits.sent[collective.group.ranks.index(rank)]) * itemsize
    if collective.op in ("broadcast", "scatter"):
        return size if rank == collective.peer else 0
    factors = {"all_reduce": (2 * (n - 1), n), "reduce_scatter": (n - 1, n), "all_gather": (n - 1, 1)}
    up, down = factors.get(collective.op, (int(collective.op in ("send", "reduce", "gather")), 1))
    return size * up // down


class Box(NamedTuple):
    """Part of a tensor of a checkpoint that a rank writes."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Holder:
    """Memory of one place of the program."""

    nbytes: int
    tensors: int
    site: str


@dataclass(frozen=True)
class Failure:
    """What ended a rank's rehearsal."""

    kind: str
    """Class of the exception."""

    message: str
    phase: str
    sites: tuple[str, ...]
    """Places in the traceback outside of torch, the innermost first."""

    holders: tuple[Holder, ...] = ()
    """The largest ones, where memory ran out."""


@dataclass
class RankRecord:
    """What one rank did."""

    rank: int
    coords: dict[str, int]
    axes: dict[Group, str] = field(default_factory=dict)
    """Names of the layout's groups."""

    collectives: list[Collective] = field(default_factory=list)
    built: int = 0
    """Bytes held when the run was built."""

    peak: int = 0
    peak_phase: str = ""
    host: int = 0
    """Bytes of the host's buffers for what is offloaded."""

    boxes: list[Box] = field(default_factory=list)
    """What it writes of a checkpoint."""

    repeated: int = 0
    """Forward and backward passes that were counted as those of other micro-batches were, and not run."""

    failure: Failure | None = None
    seconds: float = 0.0
    """Processor time of the rehearsal."""

    def name(self) -> str:
        """`rank 8 (pp 1, dp 0, tp 0)`"""
        return named(self.rank, self.coords)


def named(rank: int, coords: dict[str, int]) -> str:
    """A rank with its coordinates along the axes that are cut."""
    return (
        f"rank {rank} ({', '.join(f'{axis} {value}' for axis, value in coords.items())})" if coords else f"rank {rank}"
    )
