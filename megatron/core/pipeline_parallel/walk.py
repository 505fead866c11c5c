"""Simulation of action lists, which computes the start time of each action and detects deadlocks."""

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
"""Kinds of actions that take time. The time of two interleaved passes is attributed to the FB action that precedes
them."""


class Timed(NamedTuple):
    """An action with its start and end time."""

    action: Action
    start: float
    stop: float


class DeadlockError(ValueError):
    """Raised if action lists deadlock.

    `cycle` lists the ranks that wait for each other. Each entry is a tuple of a rank, the next action of the rank, and
    the action for which the rank waits. `cycle` is empty if a rank waits for an action that no list contains.
    """

    def __init__(self, message: str, cycle: Sequence[tuple[int, Action, Action]] = ()) -> None:
        super().__init__(message)
        self.cycle = list(cycle)


def _ranks_of(lists: Lists) -> dict[Action, int]:
    """Return a dictionary that maps each action to the rank that runs the action. The function raises ValueError if an
    action is listed twice."""
    where: dict[Action, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if action in where:
                raise ValueError(f"{action} is listed on rank {where[action]} and again on rank {rank}")
            where[action] = rank
    return where


class Walk:
    """Simulation of action lists, with or without sends and receives. The simulation records the start and end time of
    each action.

    An action starts when the previous action of its rank has ended and all its inputs have arrived. By default,
    messages take no time, and a whole backward pass takes twice as long as a forward pass. Subclasses may override
    these durations.

    In lists without sends and receives, a message arrives as soon as it has been computed, plus the time of `lag`. In
    lists with sends and receives, a receive action does not wait for its message, but the compute action that uses the
    message waits for it. If `rendezvous` is True, a send blocks until the other rank reaches the matching receive, and
    vice versa. This is the worst case for deadlocks.
    """

    def __init__(self, lists: Lists, *, rendezvous: bool = False) -> None:
        self.lists, self.rendezvous = lists, rendezvous
        self.owner = owners_of(lists)
        self.where = _ranks_of(lists)
        self.messages = any(action.kind in SENDS for action in self.where)
        self.done: dict[Action, float] = {}
        self.timeline: list[list[Timed]] = [[] for _ in lists]
        """Actions of each rank in execution order, with their start and end times."""
        self.free = [0.0] * len(lists)
        self.waiting: dict[Action, list[int]] = defaultdict(list)
        self.pairs = {unit[0]: unit[1:] for actions in lists for unit in units(actions) if len(unit) > 1}
        self.paired = {action for pair in self.pairs.values() for action in pair}
        self.verdicts: dict[int, list[tuple[Action, float]]] = {}

    def run(self) -> None:
        """Simulate the lists. If the lists cannot finish, the method raises DeadlockError."""
        ready = list(range(len(self.lists)))
        while ready:
            rank = ready.pop()
            while (action := self.head(rank)) is not None:
                if action.kind not in TIMED and action not in self.done:
                    # The rank has reached this send or receive, so the rank at the other end of the message may
                    # continue.
                    self.done[action] = self.free[rank]
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
        """Return the duration of an action. The time of two interleaved passes is the duration of the FB that precedes
        them, and the duration of each of the two passes is 0."""
        if action.kind not in TIMED or action in self.paired:
            return 0.0
        return self.time_of(self.pairs.get(action, (action,)))

    def time_of(self, actions: Sequence[Action]) -> float:
        """Return the time of a single action, or of two interleaved actions."""
        return sum(2.0 if action.kind is Kind.B else 1.0 for action in actions)

    def lag(self, stage: int | None) -> float:
        """Return the time that a message between stage `stage` and the next stage takes. If `stage` is None, return the
        time from the end of a step until a rank learns whether the update of the step was kept."""
        return 0.0

    def head(self, rank: int) -> Action | None:
        position = len(self.timeline[rank])
        return self.lists[rank][position] if position < len(self.lists[rank]) else None

    def needs(self, action: Action, rank: int) -> list[tuple[Action, float]]:
        """Return pairs (earlier action, time). The start of `action` must be at least this time after the end of each
        earlier action."""
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
        """Return pairs (earlier action, time). The VALIDATE (see `Kind`) of micro-batch `microbatch` must start at
        least this time after the end of each earlier action. The earlier actions are the last actions of all ranks in
        the previous step. Micro-batches are numbered across steps, so the micro-batches of the previous step have
        smaller numbers."""
        if microbatch not in self.verdicts:
            before = ([a for a in actions if a.kind in TIMED and a.microbatch < microbatch] for actions in self.lists)
            self.verdicts[microbatch] = [(actions[-1], self.lag(None)) for actions in before if actions]
        return self.verdicts[microbatch]

    def arrival(self, receive: Action, rank: int) -> list[tuple[Action, float]]:
        """Return pairs (earlier action, time). The message of `receive` arrives no earlier than this time after the end
        of each earlier action."""
        send = counterpart(receive)
        if self.owner.get(send.stage) == rank:
            return [(self.source(send), 0.0)]
        comm = self.lag(send.stage - (send.kind is Kind.SEND_B))
        if self.messages:
            return [(receive, comm), (send, comm)]
        return [(self.source(send), comm)]

    def source(self, send: Action) -> Action:
        """Return the compute action that computes the message of a send."""
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
