"""How long a pipeline takes: the schedule's own lists, simulated with the times of each stage. No torch.

After its warm-up a schedule repeats itself every p micro-batches. So long steps are not simulated whole: what a further
round of micro-batches adds is measured between two short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.core.pipeline_parallel.actions import COMPUTE, Action, Kind, Lists
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulator import (
    TIMED,
    Simulation,
    StageCosts,
    at_stage,
    execution_order,
    simulate,
)

ROUNDS = 3
"""Steps of more rounds of p micro-batches than this are extrapolated."""


@dataclass(frozen=True)
class PipelineTimes:
    """Of one step, by pipeline rank."""

    ends: tuple[float, ...]
    """When a rank has computed its last action."""

    messages: tuple[float, ...]
    """What of that is because messages take time."""


@dataclass(frozen=True)
class Schedule:
    """A schedule by name, as `build_schedule` takes it."""

    name: str
    layout: PipelineLayout
    group: int | None = None
    in_turns: bool = False
    validates: bool = False
    """Whether no rank waits for the others between two steps: ends are then those of a step behind another one."""

    def times(self, costs: StageCosts, microbatches: int) -> PipelineTimes:
        """Times of a step of this number of micro-batches."""
        ends = self._ends(costs, microbatches)
        alone = self._ends(replace(costs, comm=0.0), microbatches)
        return PipelineTimes(ends, tuple(max(0.0, a - b) for a, b in zip(ends, alone, strict=True)))

    def _ends(self, costs: StageCosts, microbatches: int) -> tuple[float, ...]:
        turn = max(self.layout.pp, self.group or 0)
        rounds, rest = divmod(microbatches, turn)
        if rounds <= ROUNDS:
            return self._simulated(costs, microbatches)
        few, more = (self._simulated(costs, n * turn + rest) for n in (ROUNDS - 1, ROUNDS))
        # Where stages are uneven, a round lasts as long as that of the busiest rank once the others wait for it.
        longest = turn * max(self._work(costs, rank) for rank in range(self.layout.pp))
        return tuple(b + (rounds - ROUNDS) * max(b - a, longest) for a, b in zip(few, more, strict=True))

    def _work(self, costs: StageCosts, rank: int) -> float:
        """Time that a rank computes for one micro-batch."""
        passes = (costs.forward, costs.input_grad, costs.weight_grad)
        return sum(at_stage(times, stage) for times in passes for stage in self.layout.stages_of(rank))

    def _simulated(self, costs: StageCosts, microbatches: int) -> tuple[float, ...]:
        if self.validates:
            shape = self.name, self.layout.pp, microbatches, self.layout.chunks
            time, _ = post_validated(pipeline_lists(*shape, False, self.group, self.in_turns, True), costs)
            return (time,) * self.layout.pp
        if self.in_turns:
            found = simulate(_lists(self, microbatches), costs)
            return tuple(max(timed.stop for timed in timeline) for timeline in found.timeline)
        durations = {
            kind: [costs.time(Action(kind, stage, 0)) for stage in range(self.layout.num_stages)] for kind in COMPUTE
        }
        free, done = [0.0] * self.layout.pp, list[float]()
        for rank, kind, stage, needs in _order(self, microbatches):
            start = free[rank]
            for need, edge in needs:
                arrival = done[need] if edge is None else done[need] + at_stage(costs.comm, edge)
                if arrival > start:
                    start = arrival
            free[rank] = start + durations[kind][stage]
            done.append(free[rank])
        return tuple(free)


def _lists(schedule: Schedule, microbatches: int) -> Lists:
    layout = schedule.layout
    return build_schedule(schedule.name, layout.pp, microbatches, layout.chunks, schedule.group, schedule.in_turns)


Step = tuple[int, Kind, int, list[tuple[int, int | None]]]
"""Rank, kind and stage of an action, and what it needs: the place in the order, and the first of the two stages whose
message brings it, None without a message."""


@lru_cache(maxsize=64)
def _order(schedule: Schedule, microbatches: int) -> list[Step]:
    """`execution_order` of a schedule: the same for all costs."""
    found = execution_order(_lists(schedule, microbatches))
    steps = []
    for rank, action, needs in found:
        edges = []
        for need in needs:
            sender, other, _ = found[need]
            edges.append((need, None if sender == rank else min(action.stage, other.stage)))
        steps.append((rank, action.kind, action.stage, edges))
    return steps


def message_places(layout: PipelineLayout, ranks: Sequence[int], ranks_per_node: int) -> list[bool]:
    """By stage, whether the next stage is on another node; `ranks` are those of the pipeline's places."""
    nodes = [rank // ranks_per_node for rank in ranks]
    return [
        nodes[layout.rank_of(stage)] != nodes[layout.rank_of(min(stage + 1, layout.num_stages - 1))]
        for stage in range(layout.num_stages)
    ]


STEPS = 4
"""Steps that are simulated one after the other. Of the last two the differences of their ends count."""


def consecutive(lists: Lists, steps: int) -> Lists:
    """The lists of several steps behind one another, micro-batches numbered on."""
    m = 1 + max(action.microbatch for actions in lists for action in actions)
    return [
        [action._replace(microbatch=action.microbatch + step * m) for step in range(steps) for action in actions]
        for actions in lists
    ]


def post_validated(lists: Lists, costs: StageCosts | None = None, tied: bool = False) -> tuple[float, float]:
    """(time of a step, idle share of it) in a steady run whose updates are ahead of the norm (UPDATES_AHEAD).

    `lists` are of one step, with VALIDATE; there each rank waits for the end of the step before on all ranks. Without
    VALIDATE no rank waits. arXiv 2401.10241, section 4, and section 5.2 for the bubble.

    With `tied` weights on the first and on the last rank, the sum of their gradients makes these two end a step
    together, and all others wait for the first one's forward passes: steps do not overlap.
    """
    if tied:
        alone = simulate(lists, costs)
        return alone.makespan, alone.bubble
    found = simulate(consecutive(lists, STEPS), costs)
    m = 1 + max(action.microbatch for actions in lists for action in actions)
    ends = [_end(found, step * m) for step in (STEPS - 1, STEPS)]
    time = ends[1] - ends[0]
    return time, 1 - sum(found.busy) / STEPS / len(lists) / time


def _end(found: Simulation, microbatches: int) -> float:
    """When all ranks have done what is below a number of micro-batches."""
    timed = (entry for timeline in found.timeline for entry in timeline if entry.action.kind in TIMED)
    return max(entry.stop for entry in timed if entry.action.microbatch < microbatches)
