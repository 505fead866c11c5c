"""Verdict of an audit: which rank caused a difference between two computations of a step. This module does not import
torch.

Each rank compares its own recording of a step with its peer's recording of the same work. If the two recordings differ,
the rank repeats its work, which gives a third recording. A difference originates at a rank in two cases: the first
values that differ were computed by the rank, or were received although all ranks sent equal values. In all other cases,
a rank that differs from its peer has received wrong values from another rank. The third recording shows whether the
rank or its peer computed wrong values. A rank with a permanent fault computes wrong values twice, for its own
micro-batches and for the micro-batches of another rank, and therefore gets two votes.
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
    OUTPUT: "the output differs although the inputs are equal",
    SENT: "a value that was sent differs although the inputs are equal: faulty matrix product or memory",
    RECEIVED: "the received values differ although all ranks sent the same values in both computations",
    GRADIENT: "the gradient differs although the inputs are equal: faulty matrix product or memory",
    BUCKET: "the gradient has changed in memory between its computation and the reduction",
    REDUCED: "the sum over ranks differs although its terms are equal: faulty message or memory",
    LOSS: "the loss differs although the inputs are equal",
}
"""Maps the kind of the first tensor that differs (`Difference.kind`) to the probable cause of the difference."""

CHANGED = "the weight has changed in memory since its update"


@dataclass(frozen=True)
class Difference:
    """The first tensor for which a rank's recording of its work differs from the peer's recording of this work."""

    kind: str
    label: str
    """Name of the tensor that differs, such as `decoder.layers.0.mlp.linear_fc1.weight`."""

    relative: float
    """Relative difference: the norm of the difference, divided by the larger norm of the two tensors."""

    key: str = ""
    """Key of the message in which the tensor was sent or received. The sender and the receivers of a message use the
    same key. For other tensors, the key is empty."""

    of_own: bool = True
    """True if the rank's repeated computation of the tensor agrees with its first computation."""

    of_peer: bool = True
    """True if the rank's repeated computation of the tensor agrees with the peer's computation."""


@dataclass(frozen=True)
class Report:
    """Results of one rank's comparison with its peer."""

    rank: int
    host: str
    peer: int
    """Global rank of the peer: the rank that has computed the same micro-batches for comparison."""

    first: Difference | None = None
    sent: frozenset[str] = frozenset()
    """Keys (`Difference.key`) of the messages in which this rank sent values that differ from the values recorded by
    its peer."""

    changed: tuple[str, ...] = ()
    """Names of weights that have changed in memory since the optimizer updated them."""

    reduced: tuple[tuple[str, float], ...] = ()
    """Reduced gradients of this rank that differ between the two computations, as pairs (parameter name, relative
    difference)."""


@dataclass(frozen=True)
class Finding:
    """Disagreement between ranks, and the ranks that may have caused it."""

    ranks: tuple[int, ...]
    """Ranks that may have computed the wrong values. The tuple contains a single rank if the recordings identify the
    faulty rank."""

    hosts: tuple[str, ...]
    kind: str
    tensor: str
    relative: float
    cause: str

    @property
    def damages_state(self) -> bool:
        """True if the weights are wrong, so that the next step would also start with wrong weights."""
        return self.kind == WEIGHT

    def line(self, iteration: int) -> str:
        """Return the finding as a log line."""
        who = " or ".join(f"rank {rank} on {host}" for rank, host in zip(self.ranks, self.hosts, strict=True))
        return (
            f"audit of iteration {iteration}: {who} disagrees: first {self.kind} {self.tensor}, relative difference "
            f"{self.relative:.2g}: {self.cause}"
        )


def decide(reports: Sequence[Report]) -> Finding | None:
    """Determine the faulty rank. `reports` contains the reports of all ranks, in rank order. Return None if no report
    contains a difference."""
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
    """Return True if the difference in a report originates at the rank that made the report."""
    first = report.first
    if first is None:
        return False
    return first.kind != RECEIVED or not any(first.key in each.sent for each in reports)


def _by_votes(reports: Sequence[Report], sources: Sequence[Report]) -> Finding:
    """Return a finding that names the rank with the most votes. `sources` contains the reports that count as votes. If
    `sources` contains a single report, the rank of this report and the peer of the rank may have equally many votes. In
    this case, the rank's repeated computation decides. If the repeated computation agrees with the rank's first
    computation, the finding names the peer, and otherwise the rank itself."""
    votes: Counter[int] = Counter()
    for rank in (rank for source in sources for rank in _suspects(source)):
        votes[rank] += 1
    most = max(votes.values())
    ranks = tuple(sorted(rank for rank, count in votes.items() if count == most))
    (first, source) = (sources[0].first, sources[0])
    if len(sources) == 1 and len(ranks) > 1 and first is not None:  # only one rank has repeated its work
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
    """Return an offset k such that, in each data-parallel group, the rank with index i holds the same weights and
    experts as the rank with index i + k, modulo the size of the group. Return None if there is no such offset.

    Args:
        groups: Data-parallel groups.
        experts: Expert-parallel groups. Ranks at the same index in different groups hold the same experts.
    """
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
