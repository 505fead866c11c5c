"""Which ranks of a world are rehearsed, and what each did: its collectives in order, its memory, and what ended it. No
torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.core.parallel_dims import ParallelDims

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


DISTINCT = "all-distinct"

AXES = (("pp", "dp", "cp", "tp"), ("pp", "expt_dp", "ep", "expt_tp"))


def distinct_ranks(dims: ParallelDims) -> list[int]:
    """One rank of each kind: every pipeline rank, as their lists of actions and their layers differ; and along each
    other axis the last rank beside the first, in the first and the last stage. Code may treat the ends of an axis
    differently: the first rank reports, the last shard of a buffer is shorter, the rings of context parallelism end."""
    found = {dims.rank(pp=pp) for pp in range(dims.pp)}
    for pp in {0, dims.pp - 1}:
        for order in AXES:
            for axis in order[1:]:
                found.add(dims.rank(pp=pp, **{axis: dims.size(axis) - 1}))
            found.add(dims.rank(pp=pp, **{axis: dims.size(axis) - 1 for axis in order[1:]}))
    return sorted(found)


def chosen_ranks(text: str, dims: ParallelDims) -> list[int]:
    """The ranks that --ranks says: "all-distinct", "all", or numbers and ranges as 0,8,1016-1023. Raises ValueError."""
    if text == DISTINCT:
        return distinct_ranks(dims)
    if text == "all":
        return list(range(dims.world_size))
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not (first.isdigit() and (last.isdigit() if dash else not last)):
            raise ValueError(f"--ranks {text}: {word!r} is no rank; give {DISTINCT}, all, or ranks as 0,8,16-23")
        ranks = range(int(first), int(last or first) + 1)
        if not ranks:
            raise ValueError(f"--ranks {text}: {word} ends before it begins; give the lower rank first")
        if ranks[-1] >= dims.world_size:
            raise ValueError(
                f"--ranks {text}: {word} must lie in 0 to {dims.world_size - 1}; raise --world-size, or leave it out"
            )
        found.update(ranks)
    return sorted(found)


def coords_of(rank: int, dims: ParallelDims) -> dict[str, int]:
    """Coordinates of a rank along the axes that are cut."""
    coords = dims.coords(rank)
    axes = ["pp", "dp", "cp", "tp"] + (["ep", "expt_dp", "expt_tp"] if dims.ep > 1 or dims.expt_tp != dims.tp else [])
    return {axis: coords[axis] for axis in axes if dims.size(axis) > 1}
