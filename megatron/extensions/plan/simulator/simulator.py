"""Simulate action lists: compute the start and end of each action, idle time, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import BACKWARDS, Action, Kind, Lists, units
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, Schedule
from megatron.core.pipeline_parallel.walk import TIMED, Timed, Walk

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class StageCosts:
    """Times and memory of one micro-batch on each pipeline stage. Each field is either a number that applies to all
    stages, or a sequence with one number per stage.

    A whole backward pass takes `input_grad + weight_grad`. `comm` is the time of a message: either one number for all
    ranks or, for each stage, the time of a message to the next stage. The activations of a stage, `activation`, are
    held from the forward pass (F) to the end of the backward pass. If the backward pass is split into input gradients
    (I) and weight gradients (W), only the fraction `kept_for_weight_grad` of these activations is held between I and W.

    Each forward pass (F) and each backward pass (B or I) waits for expert all-to-alls at equal intervals. `exchanges`
    is the number of all-to-alls in a pass, and `exchange` is the duration of each. While one of two interleaved passes
    waits, the other pass computes.
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
        """Return the computation time of an action; 0 for communication, whose time is in `comm`."""
        if action.kind is Kind.F:
            return at_stage(self.forward, action.stage)
        time = 0.0
        if action.kind in (Kind.B, Kind.I):
            time += at_stage(self.input_grad, action.stage)
        if action.kind in (Kind.B, Kind.W):
            time += at_stage(self.weight_grad, action.stage)
        return time

    def exchanges_of(self, action: Action) -> int:
        """Return the number of expert all-to-alls in an action."""
        return int(at_stage(self.exchanges, action.stage)) if action.kind in (Kind.F, *BACKWARDS) else 0

    def duration(self, actions: Sequence[Action]) -> tuple[float, float]:
        """Return (duration, waiting time) of one action or of two interleaved actions. Nothing is computed during the
        waiting time.

        If two actions are interleaved, each pass yields to the other pass after it has started an all-to-all, and
        resumes when the other pass yields. All-to-alls run one after another.
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
        """Return the size of the activations that an action adds to its rank (positive, for F) or frees (negative, for
        B, I and W)."""
        after = at_stage(self.kept_for_weight_grad, action.stage)
        share = {Kind.F: 1.0, Kind.B: -1.0, Kind.I: after - 1, Kind.W: -after}
        return share.get(action.kind, 0.0) * at_stage(self.activation, action.stage)


def at_stage(value: PerStage, stage: int) -> float:
    """Return the entry of `stage`, or the single number that applies to all stages."""
    return value if isinstance(value, int | float) else value[stage]


class Simulation(Walk):
    """Result of `simulate`: the times and activations of each rank if actions take the durations in `costs`."""

    def __init__(self, lists: Lists, costs: StageCosts, rendezvous: bool) -> None:
        super().__init__(lists, rendezvous=rendezvous)
        self.costs = costs
        self.peak_activations = [held_at_peak(actions, costs)[0] for actions in lists]
        self.exchanging = 0.0
        """Total time of all expert all-to-alls in a step."""
        self.exposed = 0.0
        """Part of the all-to-all time during which the rank does not compute."""
        self.run()

    def time_of(self, actions: Sequence[Action]) -> float:
        time, waited = self.costs.duration(actions)
        self.exchanging += self.costs.exchange * sum(map(self.costs.exchanges_of, actions))
        self.exposed += waited
        return time

    def lag(self, stage: int | None) -> float:
        comm = self.costs.comm
        if isinstance(comm, int | float):
            return comm
        return max(comm) if stage is None else comm[stage]

    @property
    def spans(self) -> list[float]:
        """Return the time from the first start to the last end on each rank."""
        return [timed[-1].stop - timed[0].start if timed else 0.0 for timed in self._compute]

    @property
    def busy(self) -> list[float]:
        """Return how long each rank computes or waits for an expert all-to-all."""
        return [sum(stop - start for _, start, stop in timed) for timed in self._compute]

    @property
    def makespan(self) -> float:
        """Return the time from the earliest start to the latest end over all ranks."""
        return max((timed.stop for timeline in self.timeline for timed in timeline), default=0.0)

    @property
    def bubble(self) -> float:
        """Return the idle share of a step.

        No rank updates its parameters before the gradient norm is known, and the norm depends on the gradients of all
        ranks. Therefore, the step time is the time from the earliest start to the latest end over all ranks.
        """
        time = self.makespan
        return 1 - sum(self.busy) / len(self.timeline) / time if time else 0.0

    @property
    def _compute(self) -> list[list[Timed]]:
        return [[timed for timed in timeline if timed.action.kind in TIMED] for timeline in self.timeline]


def simulate(lists: Lists, costs: StageCosts | None = None, *, rendezvous: bool = False) -> Simulation:
    """Simulate action lists, which may contain sends and receives.

    Raises DeadlockError if the lists deadlock, and ValueError if an action is listed twice.
    """
    return Simulation(lists, costs or StageCosts(), rendezvous)


def held_at_peak(actions: Sequence[Action], costs: StageCosts) -> tuple[float, dict[int, int]]:
    """Return the peak activations that a rank holds between two actions, and the number of micro-batches in flight in
    each stage at that peak.

    If the list has no backward passes, activations are released after each action. Two interleaved passes count as one
    action, although the rank also holds part of one more micro-batch while they run.
    """
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


def lists_of_steps(schedule: str, p: int, steps: Sequence[int]) -> Schedule:
    """Return the action lists of a run without pipeline flushes. `steps` contains the number of micro-batches of each
    step. Micro-batches are numbered consecutively."""
    of_step = PIPELINE_SCHEDULES.facts(schedule).of_step
    assert of_step is not None, f"{schedule} flushes"
    lists: Schedule = [[] for _ in range(p)]
    first = 0
    for before, own, after in zip([0, *steps[:-1]], steps, [*steps[1:], 0], strict=True):
        for actions, own_part in zip(lists, of_step(schedule, p, before, own, after), strict=True):
            actions += [action._replace(microbatch=action.microbatch + first) for action in own_part]
        first += own
    return lists
