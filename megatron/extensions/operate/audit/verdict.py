"""Which rank a difference between two computations of a step points to. This module does not import torch.

Each rank has three recordings of one step of its replica: its own, that of its peer in another replica, and, once the
two differ, its own again. A rank is the source of a difference if what it computed differs first, or what it received
although all that the others sent is equal. The rest differ because they were given wrong values. The third recording
tells whether the rank or its peer erred; a rank that errs always does so in its own part and in that of the rank whose
peer it is, and gets two votes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WEIGHT = "weight"
OUTPUT = "output"
SENT = "sent"
RECEIVED = "received"
GRADIENT = "gradient"
BUCKET = "bucket"
REDUCED = "reduced"
LOSS = "loss"

CAUSES = {
    WEIGHT: "the weights differ before the step",
    OUTPUT: "the output differs though the inputs are equal",
    SENT: "a value that was sent differs though the inputs are equal: a matrix product or memory",
    RECEIVED: "the message differs though all that was sent is equal",
    GRADIENT: "the gradient differs though the inputs are equal: a matrix product or memory",
    BUCKET: "the gradient has changed in memory between its computation and the reduction",
    REDUCED: "the sum over ranks differs though its terms are equal: a message or memory",
    LOSS: "the loss differs though the inputs are equal",
}
"""Kind of a recording -> what it says if it is the first that differs."""

CHANGED = "the weight has changed in memory since its update"


@dataclass(frozen=True)
class Difference:
    """The first recording of a rank that differs from its peer's."""

    kind: str
    label: str
    """The tensor, as `decoder.layers.0.mlp.linear_fc1.weight`."""

    relative: float
    """Norm of the difference over the norm."""

    key: str = ""
    """Of a message: the same on all ranks that take part in it."""

    of_own: bool = True
    """True if the rank's own second recording equals the first."""

    of_peer: bool = True
    """True if the rank's own second recording equals its peer's."""


@dataclass(frozen=True)
class Report:
    """What a rank has found."""

    rank: int
    host: str
    peer: int
    """The rank that has computed its part a second time."""

    first: Difference | None = None
    sent: frozenset[str] = frozenset()
    """Keys of messages of which this rank's operands differ."""

    changed: tuple[str, ...] = ()
    """Weights that have changed since their update."""

    reduced: tuple[tuple[str, float], ...] = ()
    """(parameter, relative difference) of reduced gradients that this rank owns."""


@dataclass(frozen=True)
class Finding:
    """A disagreement, with the ranks that it points to."""

    ranks: tuple[int, ...]
    """One; several where the recordings do not tell which."""

    hosts: tuple[str, ...]
    kind: str
    tensor: str
    relative: float
    cause: str

    @property
    def damages_state(self) -> bool:
        """True if the next step would begin with wrong weights too."""
        return self.kind == WEIGHT

    def line(self, iteration: int) -> str:
        """The line of the log."""
        who = " or ".join(f"rank {rank} on {host}" for rank, host in zip(self.ranks, self.hosts, strict=True))
        return (
            f"audit of iteration {iteration}: {who} disagrees: first {self.kind} {self.tensor}, relative difference "
            f"{self.relative:.2g}: {self.cause}"
        )


def decide(reports: Sequence[Report]) -> Finding | None:
    """The ranks that the reports of all ranks, in order of rank, point to; None if nothing differs."""
    if changed := next((each for each in reports if each.changed), None):
        return _finding(reports, (changed.rank,), Difference(WEIGHT, changed.changed[0], 0.0), CHANGED)
    sources = [each for each in reports if _is_source(each, reports)]
    if sources:
        return _by_votes(reports, sources)
    reduced = [each for each in reports if each.reduced]
    if reduced:
        name, relative = reduced[0].reduced[0]
        ranks = tuple(each.rank for each in reduced if name in dict(each.reduced))
        return _finding(reports, ranks, Difference(REDUCED, name, relative), CAUSES[REDUCED])
    inherited = [each for each in reports if each.first is not None]
    return _by_votes(reports, inherited) if inherited else None


def _is_source(report: Report, reports: Sequence[Report]) -> bool:
    """Return whether a difference began on this rank."""
    first = report.first
    if first is None:
        return False
    return first.kind != RECEIVED or not any(first.key in each.sent for each in reports)


def _by_votes(reports: Sequence[Report], sources: Sequence[Report]) -> Finding:
    """The rank that most differences point to; among equals, one whose recordings differ from each other."""
    votes: Counter[int] = Counter()
    for rank in (rank for source in sources for rank in _suspects(source)):
        votes[rank] += 1
    most = max(votes.values())
    ranks = tuple(sorted(rank for rank, count in votes.items() if count == most))
    (first, source) = (sources[0].first, sources[0])
    if len(sources) == 1 and len(ranks) > 1 and first is not None:  # the rank made its part twice, the peer once
        ranks = (source.peer if first.of_own else source.rank,)
    source = next(each for each in sources if set(_suspects(each)) & set(ranks))
    assert source.first is not None
    return _finding(reports, ranks, source.first, CAUSES[source.first.kind])


def _suspects(report: Report) -> Iterator[int]:
    first = report.first
    assert first is not None
    yield report.rank
    if first.of_own or not first.of_peer:
        yield report.peer


def _finding(reports: Sequence[Report], ranks: tuple[int, ...], first: Difference, cause: str) -> Finding:
    hosts = {each.rank: each.host for each in reports}
    return Finding(ranks, tuple(hosts[rank] for rank in ranks), first.kind, first.label, first.relative, cause)


def shift_of_replicas(groups: Sequence[Sequence[int]], experts: Sequence[Sequence[int]]) -> int | None:
    """By how many data-parallel ranks the parts of a step move so that each rank gets that of another with the same
    weights and experts; None if there is no other. `groups` are the data-parallel groups, `experts` the groups of
    expert parallelism with one expert each at the same place."""
    place = {rank: number for ranks in experts for number, rank in enumerate(ranks)}
    size = len(groups[0])
    for shift in range(1, size):
        if all(
            place.get(ranks[number]) == place.get(ranks[(number + shift) % size])
            for ranks in groups
            for number in range(size)
        ):
            return shift
    return None
