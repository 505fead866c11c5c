"""When every action of a set of lists runs, how much of the time is idle, and what memory it takes.

Ranks share nothing but messages, so the start of an action is the latest of: the end of the action before it on
its rank, and the arrival of what it needs. The same walk finds out whether the lists can run at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.actions import (
    BACKWARDS,
    COMPUTE,
    SENDS,
    Action,
    Kind,
    Lists,
    counterpart,
    owners_of,
    units,
)

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class StageCosts:
    """Times and memory of one microbatch on one stage: one number for all stages, or one for each.

    A whole backward takes `input_grad + weight_grad`. `comm` is the time of a message between two ranks, or by stage
    that of messages between the stage and the next one.
    `activation` is held from F to the end of the backward; between I and W this times `kept_for_weight_grad`.

    Each F, and each B or I, has `exchanges` all-to-alls of experts at equal distances, each of time `exchange`, in
    which it waits. Passes that run in turns compute meanwhile.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    comm: PerStage = 0.0
    activation: PerStage = 1.0
    kept_for_weight_grad: PerStage = 1.0
    exchanges: int | Sequence[int] = 0
    exchange: float = 0.0

    def time(self, action: Action) -> float:
        """Time that a compute action computes; 0 of others, whose time is in `comm`."""
        if action.kind is Kind.F:
            return at_stage(self.forward, action.stage)
        time = 0.0
        if action.kind in (Kind.B, Kind.I):
            time += at_stage(self.input_grad, action.stage)
        if action.kind in (Kind.B, Kind.W):
            time += at_stage(self.weight_grad, action.stage)
        return time

    def exchanges_of(self, action: Action) -> int:
        """All-to-alls of an action."""
        return int(at_stage(self.exchanges, action.stage)) if action.kind in (Kind.F, *BACKWARDS) else 0

    def duration(self, actions: Sequence[Action]) -> tuple[float, float]:
        """(time, part of it in which nothing is computed) of an action alone, or of two that run in turns.

        A pass hands over when it has started an all-to-all, and takes over again when the other one does. All-to-alls
        run one after the other.
        """
        left = [self.exchanges_of(action) for action in actions]
        part = [self.time(action) / (count + 1) for action, count in zip(actions, left, strict=True)]
        arrival, unfinished = [0.0] * len(actions), list(range(len(actions)))
        clock = channel = waited = 0.0
        while unfinished:
            running = unfinished.pop(0)
            waited += max(0.0, arrival[running] - clock)
            clock = max(clock, arrival[running]) + part[running]
            if left[running]:
                left[running] -= 1
                channel = arrival[running] = max(clock, channel) + self.exchange
                unfinished.append(running)
        return clock, waited

    def memory(self, action: Action) -> float:
        """Activations that an action adds to (F) or frees from (B, I, W) its rank."""
        after = at_stage(self.kept_for_weight_grad, action.stage)
        share = {Kind.F: 1.0, Kind.B: -1.0, Kind.I: after - 1, Kind.W: -after}
        return share.get(action.kind, 0.0) * at_stage(self.activation, action.stage)


def at_stage(value: PerStage, stage: int) -> float:
    """The entry of `stage`, or the one number that stands for all stages."""
    return value if isinstance(value, int | float) else value[stage]


TIMED = COMPUTE | {Kind.FB}
"""What takes time. FB has the time of the two that run in turns, which take none beside."""


class Timed(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found out, by rank. `timeline` has the actions of a rank in order."""

    timeline: list[list[Timed]]
    peak_activations: list[float]

    exchanging: float = 0.0
    """Time of all all-to-alls of experts."""

    exposed: float = 0.0
    """Part of it in which their rank computes nothing."""

    @property
    def spans(self) -> list[float]:
        """From the first start to the last end of each rank."""
        return [timed[-1].stop - timed[0].start if timed else 0.0 for timed in self._compute]

    @property
    def busy(self) -> list[float]:
        """Time that each rank computes, or waits for an all-to-all of experts."""
        return [sum(stop - start for _, start, stop in timed) for timed in self._compute]

    @property
    def makespan(self) -> float:
        """From the first start to the last end of all ranks."""
        return max((timed.stop for timeline in self.timeline for timed in timeline), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle share of a step: no rank updates its parameters before the gradient norm is known, which needs the
        gradients of all ranks, so that a step lasts from the first start to the last end of all of them."""
        time = self.makespan
        return 1 - sum(self.busy) / len(self.timeline) / time if time else 0.0

    @property
    def _compute(self) -> list[list[Timed]]:
        return [[timed for timed in timeline if timed.action.kind in TIMED] for timeline in self.timeline]


class DeadlockError(ValueError):
    """Lists that cannot run to their end. `cycle` has (rank, its next action, what that waits for) for each rank
    of the cycle; it is empty where an action waits for one that no list has."""

    def __init__(self, message: str, cycle: Sequence[tuple[int, Action, Action]] = ()) -> None:
        super().__init__(message)
        self.cycle = list(cycle)


def simulate(lists: Lists, costs: StageCosts | None = None, *, rendezvous: bool = False) -> Simulation:
    """Runs lists, with or without sends and receives, on paper.

    Lists without communication get their messages as soon as they are computed. With it, a receive waits for
    nothing and the compute action that uses it does; with `rendezvous` both sends and receives keep their rank
    waiting until the other end is reached, the hardest case for lists to be free of deadlock.
    Raises DeadlockError naming the cycle if they are not, ValueError if an action is listed twice.
    """
    costs = costs or StageCosts()
    walk = _Walk(lists, costs, rendezvous)
    walk.run()
    peaks = [held_at_peak(actions, costs)[0] for actions in lists]
    return Simulation(walk.timeline, peaks, walk.exchanging, walk.exposed)


def held_at_peak(actions: Sequence[Action], costs: StageCosts) -> tuple[float, dict[int, int]]:
    """The most activations that a rank holds between two actions, and the micro-batches of each stage that are between
    their forward and their backward then. A list without a backward holds the activations of one action. Two passes
    that run in turns are one action: while they run, one more is held in part."""
    forward_only = all(action.kind not in (Kind.B, Kind.I) for action in actions)
    held = peak = 0.0
    inside: Counter[int] = Counter()
    most: dict[int, int] = {}
    for unit in units(actions):
        for action in unit:
            held += costs.memory(action)
            inside[action.stage] += (action.kind is Kind.F) - (action.kind in BACKWARDS)
        if held > peak:
            peak, most = held, dict(inside)
        if forward_only:
            held = 0.0
            inside.clear()
    return peak, most


def _ranks_of(lists: Lists) -> dict[Action, int]:
    """The rank of each action. Raises ValueError if one is listed twice."""
    where: dict[Action, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if action in where:
                raise ValueError(f"{action} is listed on rank {where[action]} and again on rank {rank}")
            where[action] = rank
    return where


class _Walk:
    """The state of one simulation: each rank's position, and the time at which each action was done."""

    def __init__(self, lists: Lists, costs: StageCosts, rendezvous: bool) -> None:
        self.lists, self.costs, self.rendezvous = lists, costs, rendezvous
        self.owner = owners_of(lists)
        self.where = _ranks_of(lists)
        self.messages = any(action.kind in SENDS for action in self.where)
        self.done: dict[Action, float] = {}
        self.timeline: list[list[Timed]] = [[] for _ in lists]
        self.free = [0.0] * len(lists)
        self.waiting: dict[Action, list[int]] = defaultdict(list)
        self.pairs = {unit[0]: unit[1:] for actions in lists for unit in units(actions) if len(unit) > 1}
        self.paired = {action for pair in self.pairs.values() for action in pair}
        self.verdicts: dict[int, list[tuple[Action, float]]] = {}
        self.exchanging = self.exposed = 0.0

    def run(self) -> None:
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
        """The time of an action; of those that run in turns, the time that FB stands for."""
        if action.kind not in TIMED or action in self.paired:
            return 0.0
        actions = self.pairs.get(action, (action,))
        time, waited = self.costs.duration(actions)
        self.exchanging += self.costs.exchange * sum(map(self.costs.exchanges_of, actions))
        self.exposed += waited
        return time

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
            comm = self.costs.comm
            lag = comm if isinstance(comm, int | float) else max(comm)
            self.verdicts[microbatch] = [(actions[-1], lag) for actions in before if actions]
        return self.verdicts[microbatch]

    def arrival(self, receive: Action, rank: int) -> list[tuple[Action, float]]:
        """Dependencies of the message of `receive`."""
        send = counterpart(receive)
        if self.owner.get(send.stage) == rank:
            return [(self.source(send), 0.0)]
        comm = at_stage(self.costs.comm, send.stage - (send.kind is Kind.SEND_B))
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
