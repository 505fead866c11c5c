"""Analysis of hangs: compare the last collectives of all ranks in torch's flight recorder to find the ranks at fault.

A rank that has entered a collective waits for the ranks of its group that have not entered it. A receiver waits for the
sender. If two ranks wait for each other, their code took different branches. The branch that fewer ranks took is
assumed to be wrong. If more than two ranks wait in a cycle, the rank at fault is the one that skipped a collective that
all other ranks entered. Without a cycle, a rank is at fault if other ranks wait for it and it waits for no rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from megatron.core.parallel_state import ParallelState
from megatron.core.torch_private import flight_records
from megatron.training.hooks import Callback
from megatron.training.reliability.failure_report import place_in
from megatron.training.reliability.rank_status import Blame, HangAnalysis, RankStatus, Standing

KEPT = 2000
"""Number of collectives that torch's flight recorder keeps on each rank."""

MALFORMED = (KeyError, OverflowError, TypeError, ValueError)
"""Exceptions that are raised if a value that is being parsed has an unexpected type."""


@dataclass(frozen=True)
class Entered:
    """Last collective that a rank entered in a process group."""

    axis: str
    ranks: tuple[int, ...]
    number: int
    """Number of collectives that the rank has entered in this group. The number identifies the collective, because all
    ranks of the group count the same collectives."""

    what: str
    """Description of the collective, such as `all_reduce [4, 8] Float`."""

    pending: bool

    @classmethod
    def of(cls, values: Any) -> Entered:
        """Parse a collective that is represented in JSON types. Raises one of the exceptions in `MALFORMED` if the
        value is not a collective."""
        ranks = tuple(map(int, values["ranks"]))
        if not ranks:
            raise ValueError("a group has ranks")
        return cls(str(values["axis"]), ranks, int(values["number"]), str(values["what"]), bool(values["pending"]))

    def __str__(self) -> str:
        return f"{self.what} (number {self.number} over {self.axis}, ranks {', '.join(map(str, self.ranks))})"


Group = tuple[str, tuple[int, ...]]
"""Key that identifies a process group: the name of its axis, and its ranks."""


def groups_of(state: ParallelState) -> dict[str, Group]:
    """Return a dict that maps the torch name of each process group of this rank to the `Group` key of the process
    group."""
    axes = {"all ranks": state.world, **state.axes}
    found: dict[str, Group] = {}
    for name, axis in axes.items():
        if axis.group is not None:
            found.setdefault(axis.group.group_name, (name, axis.ranks))
    return found


class FlightEntry(TypedDict):
    """Fields of a collective in torch's flight recorder that this module reads."""

    is_p2p: bool
    process_group: list[str]
    state: str
    retired: bool
    collective_seq_id: int
    profiling_name: str
    input_sizes: NotRequired[list[list[int]]]
    input_dtypes: NotRequired[list[str]]


class FlightTrace(TypedDict, total=False):
    """Flight recorder dump of one torch.distributed backend."""

    entries: list[FlightEntry]


def traces() -> list[FlightTrace]:
    """Return the records of every backend's flight recorder; empty if this torch version has no flight recorder."""
    return [json.loads(text) if text else {} for text in flight_records()]


def last_entered(recorded: list[FlightTrace], groups: Mapping[str, Group], last_pending: bool = False) -> list[Entered]:
    """Return, for each group in `groups`, the collective that this rank entered last. If several collectives of a group
    are pending, return the first of them. If `last_pending` is True, the most recent collective counts as pending,
    because it failed.
    """
    found: dict[str, Entered] = {}
    for trace in recorded:
        entries = [e for e in trace.get("entries", []) if not e["is_p2p"] and e["process_group"][0] in groups]
        for place, entry in enumerate(entries, 1 - len(entries)):
            name = entry["process_group"][0]
            over = entry["state"] == "completed" or entry["retired"]
            pending = not over or (last_pending and place == 0)
            if name in found and found[name].pending and pending:
                continue  # if several collectives are pending, keep the first
            found[name] = Entered(*groups[name], entry["collective_seq_id"], _describe(entry), pending)
    return list(found.values())


def _describe(entry: FlightEntry) -> str:
    operation = entry["profiling_name"].rpartition(":")[2]
    sizes, dtypes = entry.get("input_sizes") or [[]], entry.get("input_dtypes") or [""]
    return f"{operation} {list(sizes[0])} {dtypes[0]}".strip()


ANY_SIZES = ("all_to_all", "all_to_all_single", "alltoall", "alltoall_base")
"""Collectives whose tensors may have different sizes on different ranks."""


@dataclass(frozen=True)
class Waiting:
    """Evidence about the collective or message that a rank waits for when the run fails."""

    place: str
    """Location in the code at which the rank waits."""

    entered: tuple[Entered, ...] = ()
    message_from: int | None = None
    """Rank from which this rank waits for a message; None if it waits for no message."""

    @classmethod
    def of(cls, standing: Standing) -> Waiting:
        """Parse what a rank reported: its last collective in each group, and the rank whose message it waits for. If
        the report is malformed, assume that the rank does not wait for another rank."""
        if not isinstance(standing.evidence, list | tuple):
            return cls(standing.place)
        try:
            entered, sender = standing.evidence
            return cls(standing.place, tuple(map(Entered.of, entered)), None if sender is None else int(sender))
        except MALFORMED:
            return cls(standing.place)

    @property
    def waits_in(self) -> Entered | None:
        return next((each for each in self.entered if each.pending), None)

    def in_group(self, of: Entered) -> Entered | None:
        """Return the last collective that this rank entered in the process group of `of`; None if it entered none."""
        return next((each for each in self.entered if (each.axis, each.ranks) == (of.axis, of.ranks)), None)


class CollectivesAnalysis(HangAnalysis):
    """Hang analysis that compares the last collectives of all ranks in torch's flight recorder."""

    def __init__(self, status: RankStatus) -> None:
        super().__init__(status)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))  # torch reads this variable in `init_process_group`

    def evidence(self) -> object:
        """Return a list of two items: this rank's last collective in each process group, and the rank whose message
        this rank waits for (or None)."""
        status, error = self.status, self.status.error
        # an error means that the most recent collective failed, unless it occurred in a message between pipeline stages
        last_pending = error is not None and not place_in(error).startswith("p2p.py:")
        groups = groups_of(status.state) if status.state is not None else {}
        entered = last_entered(traces(), groups, last_pending) if groups else []
        if (met := status.meeting) is not None:
            entered.append(
                Entered("the ranks at start-up", met.ranks, met.number, f"the end of {met.what}", met.pending)
            )
        return [list(map(asdict, entered)), getattr(status.executor, "message_from", None)]

    def blame(self, standings: Mapping[int, Standing]) -> Blame | None:
        return blame({rank: Waiting.of(standing) for rank, standing in standings.items()})

    def write(self, folder: Path, rank: int) -> None:
        """Write this rank's flight recorder dump to a file in `folder`."""
        if recorded := [trace for trace in traces() if trace.get("entries")]:
            (folder / f"collectives-{rank:05d}.json").write_text(json.dumps(recorded))


class LastCollectives(Callback):
    """Callback that compares the last collectives of all ranks if the run hangs."""

    def hang_analysis(self, status: RankStatus) -> HangAnalysis:
        return CollectivesAnalysis(status)


def blame(standings: Mapping[int, Waiting]) -> Blame | None:
    """Return the ranks at fault and a message that explains why; None if the evidence does not identify them."""
    waits = {rank: _waits_for(rank, standings) for rank in standings}
    if found := _other_branch(standings):
        return found
    waited_for = set().union(*waits.values()) if waits else set()
    late = tuple(sorted(rank for rank in waited_for if not waits.get(rank)))
    if not late:
        return _left_out(standings)
    waiting = sorted(rank for rank, peers in waits.items() if peers)
    why = f"{_named(waiting)} waited for {_named(late)}, which did not arrive: " + "; ".join(
        f"rank {rank} was at {standings[rank].place}" for rank in late
    )
    return Blame(late, "did not reach the point where the others waited", why)


def _left_out(standings: Mapping[int, Waiting]) -> Blame | None:
    """Blame a rank that skipped a collective and waits in a different one. All other ranks must have entered the
    skipped collective, each in its own group along one axis. Return None unless exactly one rank meets these
    conditions."""
    found: dict[int, str] = {}
    for rank, me in standings.items():
        others = [standing for other, standing in standings.items() if other != rank]
        for axis in {each.axis for other in others for each in other.entered}:
            numbers = {each.number for other in others for each in other.entered if each.axis == axis}
            everywhere = all(any(each.axis == axis for each in other.entered) for other in others)
            mine = max((each.number for each in me.entered if each.axis == axis), default=0)
            if me.waits_in and everywhere and len(others) > 1 and len(numbers) == 1 and mine < min(numbers):
                theirs = next(each.what for each in others[0].entered if each.axis == axis)
                found[rank] = f"rank {rank} entered {me.waits_in} and skipped the collective that all others entered "
                found[rank] += f"over {axis}: {theirs} (number {numbers.pop()})"
    if len(found) != 1:
        return None
    [(rank, why)] = found.items()
    return Blame((rank,), "entered a different collective than the others", why)


def _waits_for(rank: int, standings: Mapping[int, Waiting]) -> set[int]:
    me = standings[rank]
    found = {me.message_from} if me.message_from in standings else set()
    for mine in me.entered:
        if mine.pending:
            found |= {peer for peer in mine.ranks if peer in standings and _behind(standings[peer], mine)}
    return {peer for peer in found if peer is not None} - {rank}


def _behind(other: Waiting, mine: Entered) -> bool:
    theirs = other.in_group(mine)
    return theirs is None or theirs.number < mine.number


def _other_branch(standings: Mapping[int, Waiting]) -> Blame | None:
    guilty: dict[int, str] = {}
    undecided: dict[int, str] = {}
    for a in sorted(standings):
        for b in sorted(standings):
            if a < b and (clash := _clash(a, b, standings)):
                followed = [_followed(clash[rank], standings) for rank in (a, b)]
                what = {
                    rank: f"rank {rank} entered {clash[rank]} while rank {peer} entered {clash[peer]}"
                    for rank, peer in ((a, b), (b, a))
                }
                if followed[0] == followed[1]:
                    undecided |= what
                else:
                    rank = a if followed[0] < followed[1] else b
                    guilty.setdefault(rank, what[rank])
    found = guilty or undecided
    if not found:
        return None
    lines = list(found.values()) if guilty else list(found.values())[:1]
    return Blame(tuple(sorted(found)), "entered a different collective than the others", "; ".join(lines))


def _clash(a: int, b: int, standings: Mapping[int, Waiting]) -> dict[int, Entered] | None:
    """Return the collectives in which the ranks `a` and `b` block each other, keyed by rank; None if the ranks do not
    block each other. Two ranks block each other in two cases. In the first case, each rank waits in a collective that
    the other rank has not entered. In the second case, the ranks have entered different collectives with the same
    number in one group."""
    mine = [each for each in standings[a].entered if each.pending and b in each.ranks]
    theirs = [each for each in standings[b].entered if each.pending and a in each.ranks]
    for x in standings[a].entered:
        y = standings[b].in_group(x)
        if y and x.number == y.number and (x.pending or y.pending) and _kind(x) != _kind(y):
            return {a: x, b: y}
    for x in mine:
        for y in theirs:
            if _behind(standings[b], x) and _behind(standings[a], y):
                return {a: x, b: y}
    return None


def _kind(entered: Entered) -> str:
    operation = entered.what.split(" ")[0]
    return operation if operation in ANY_SIZES else entered.what


def _followed(entered: Entered, standings: Mapping[int, Waiting]) -> tuple[int, float]:
    """Count the ranks that have entered the same collective as `entered`, or a later collective of their group. Return
    two values: the number of such ranks in all groups along the axis of `entered`, and the fraction of such ranks in
    the group of `entered`."""

    def has(other: Entered) -> bool:
        return other.number > entered.number or (other.number == entered.number and _kind(other) == _kind(entered))

    ranks = {r for r, s in standings.items() for other in s.entered if other.axis == entered.axis and has(other)}
    return len(ranks), len(ranks & set(entered.ranks)) / len(entered.ranks)


def _named(ranks: list[int] | tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
