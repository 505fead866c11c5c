"""The order in which the actions of a set of lists start, and whether they can run to their end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.actions import (
    COMPUTE,
    SENDS,
    Action,
    Kind,
    Lists,
    counterpart,
    owners_of,
    units,
)

TIMED = COMPUTE | {Kind.FB}
"""Kinds of actions that take time. FB has the time of the two that run in turns, which take none beside."""


class Timed(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    stop: float


class DeadlockError(ValueError):
    """Lists that cannot run to their end. `cycle` has (rank, its next action, what that waits for) for each rank
    of the cycle; it is empty where an action waits for one that no list has."""

    def __init__(self, message: str, cycle: Sequence[tuple[int, Action, Action]] = ()) -> None:
        super().__init__(message)
        self.cycle = list(cycle)


def _ranks_of(lists: Lists) -> dict[Action, int]:
    """The rank of each action. Raises ValueError if one is listed twice."""
    where: dict[Action, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if action in where:
                raise ValueError(f"{action} is listed on rank {where[action]} and again on rank {rank}")
            where[action] = rank
    return where


class Walk:
    """Runs lists, with or without sends and receives: each rank's position, and the time at which each action was done.

    Ranks share nothing but messages, so the start of an action is the latest of: the end of the action before it on
    its rank, and the arrival of what it needs. Here messages take no time, and a whole backward as long as two
    forwards; what derives from this may say otherwise. Lists without communication get their messages as soon as they
    are computed. With it, a receive waits for nothing and the compute action that uses it does; with `rendezvous` both
    sends and receives keep their rank waiting until the other end is reached, the hardest case for lists to be free of
    deadlock.
    """

    def __init__(self, lists: Lists, *, rendezvous: bool = False) -> None:
        self.lists, self.rendezvous = lists, rendezvous
        self.owner = owners_of(lists)
        self.where = _ranks_of(lists)
        self.messages = any(action.kind in SENDS for action in self.where)
        self.done: dict[Action, float] = {}
        self.timeline: list[list[Timed]] = [[] for _ in lists]
        """The actions of each rank in order."""
        self.free = [0.0] * len(lists)
        self.waiting: dict[Action, list[int]] = defaultdict(list)
        self.pairs = {unit[0]: unit[1:] for actions in lists for unit in units(actions) if len(unit) > 1}
        self.paired = {action for pair in self.pairs.values() for action in pair}
        self.verdicts: dict[int, list[tuple[Action, float]]] = {}

    def run(self) -> None:
        """Raises DeadlockError naming the cycle if the lists cannot run to their end."""
        ready = list(range(len(self.lists)))
        while ready:
            rank = ready.pop()
            while (action := self.head(rank)) is not None:
                if action.kind not in TIMED and action not in self.done:
                    self.done[action] = self.free[rank]  # reached: the other end may go on
                    ready += self.waiting.pop(action, [])
                needs = self.needs(action, rank)
                missing = next((need for need, _ in needs if need not in self.done), None)
                if missing is not None:
                    self.waiting[missing].append(rank)
                    break
                start = max([self.free[rank]] + [self.done[need] + lag for need, lag in needs])
                self.free[rank] = start + self.duration(action)
                self.timeline[rank].append(Timed(action, start, self.free[rank]))
                self.done[action] = self.free[rank]
                ready += self.waiting.pop(action, [])
        self.check_finished()

    def duration(self, action: Action) -> float:
        """Time of an action; if two actions alternate, their FB has the time of both."""
        if action.kind not in TIMED or action in self.paired:
            return 0.0
        return self.time_of(self.pairs.get(action, (action,)))

    def time_of(self, actions: Sequence[Action]) -> float:
        """Time that one action takes, or two that run in turns."""
        return sum(2.0 if action.kind is Kind.B else 1.0 for action in actions)

    def lag(self, stage: int | None) -> float:
        """Time of a message between a stage and the next one, or (None) of the verdict on the step before."""
        return 0.0

    def head(self, rank: int) -> Action | None:
        position = len(self.timeline[rank])
        return self.lists[rank][position] if position < len(self.lists[rank]) else None

    def needs(self, action: Action, rank: int) -> list[tuple[Action, float]]:
        """Dependencies of an action, each with the time by which it must precede it."""
        kind, stage, microbatch = action
        if kind is Kind.FB:
            return [need for part in self.pairs[action] for need in self.needs(part, rank)]
        if kind is Kind.W:
            return [(Action(Kind.I, stage, microbatch), 0.0)]
        if kind is Kind.F:
            return self.arrival(Action(Kind.RECV_F, stage, microbatch), rank) if stage else []
        if kind in (Kind.B, Kind.I):
            own = [(Action(Kind.F, stage, microbatch), 0.0)]
            last = stage + 1 not in self.owner
            return own if last else own + self.arrival(Action(Kind.RECV_B, stage, microbatch), rank)
        if kind is Kind.VALIDATE:
            return self.verdict(microbatch)
        needs = [(self.source(action), 0.0)] if kind in SENDS else []
        return needs + ([(counterpart(action), 0.0)] if self.rendezvous else [])

    def verdict(self, microbatch: int) -> list[tuple[Action, float]]:
        """The last actions of all ranks in the step before, whose micro-batches have smaller numbers."""
        if microbatch not in self.verdicts:
            before = ([a for a in actions if a.kind in TIMED and a.microbatch < microbatch] for actions in self.lists)
            self.verdicts[microbatch] = [(actions[-1], self.lag(None)) for actions in before if actions]
        return self.verdicts[microbatch]

    def arrival(self, receive: Action, rank: int) -> list[tuple[Action, float]]:
        """Dependencies of the message of `receive`."""
        send = counterpart(receive)
        if self.owner.get(send.stage) == rank:
            return [(self.source(send), 0.0)]
        comm = self.lag(send.stage - (send.kind is Kind.SEND_B))
        if self.messages:
            return [(receive, comm), (send, comm)]
        return [(self.source(send), comm)]

    def source(self, send: Action) -> Action:
        """The compute action whose result a send sends."""
        if send.kind is Kind.SEND_F:
            return Action(Kind.F, send.stage, send.microbatch)
        halves = Action(Kind.I, send.stage, send.microbatch)
        return halves if halves in self.where else Action(Kind.B, send.stage, send.microbatch)

    def check_finished(self) -> None:
        stuck: dict[int, tuple[Action, Action]] = {}
        for need, ranks in self.waiting.items():
            for rank in ranks:
                action = self.head(rank)
                assert action is not None
                if need not in self.where:
                    raise DeadlockError(f"rank {rank} waits at {action} for {need}, which is in no list")
                stuck[rank] = (action, need)
        if not stuck:
            return
        path = [min(stuck)]
        while (following := self.where[stuck[path[-1]][1]]) not in path:
            path.append(following)
        cycle = [(rank, *stuck[rank]) for rank in path[path.index(following) :]]
        steps = [f"rank {r} waits at {action} for {need} of rank {self.where[need]}" for r, action, need in cycle]
        raise DeadlockError("deadlock: " + "; ".join(steps), cycle)
