"""How long a pipeline takes: the schedule's own lists, simulated with the times of each stage. No torch.

After its warm-up a schedule repeats itself every p micro-batches. So long steps are not simulated whole: what a further
round of micro-batches adds is measured between two short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulator import StageCosts, simulate
from megatron.core.pipeline_parallel.steady_state import post_validated

ROUNDS = 4
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
    post_validation: bool = False
    """Whether no rank waits for the others between two steps: ends are then those of a step behind another one."""

    def times(self, costs: StageCosts, microbatches: int) -> PipelineTimes:
        """Of a step of so many micro-batches."""
        ends = self._ends(costs, microbatches)
        alone = self._ends(replace(costs, comm=0.0), microbatches)
        return PipelineTimes(ends, tuple(max(0.0, a - b) for a, b in zip(ends, alone, strict=True)))

    def _ends(self, costs: StageCosts, microbatches: int) -> tuple[float, ...]:
        turn = max(self.layout.pp, self.group or 0)
        rounds, rest = divmod(microbatches, turn)
        if rounds <= ROUNDS:
            return self._simulated(costs, microbatches)
        few, more = (self._simulated(costs, n * turn + rest) for n in (ROUNDS - 1, ROUNDS))
        return tuple(b + (rounds - ROUNDS) * (b - a) for a, b in zip(few, more, strict=True))

    def _simulated(self, costs: StageCosts, microbatches: int) -> tuple[float, ...]:
        shape = self.name, self.layout.pp, microbatches, self.layout.chunks
        if self.post_validation:
            time, _ = post_validated(pipeline_lists(*shape, False, self.group, self.in_turns, True), costs)
            return (time,) * self.layout.pp
        lists = build_schedule(*shape, self.group, self.in_turns)
        found = simulate(lists, costs)
        return tuple(max(timed.stop for timed in timeline) for timeline in found.timeline)


def message_places(layout: PipelineLayout, ranks: Sequence[int], ranks_per_node: int) -> list[bool]:
    """By stage, whether the next stage is on another node; `ranks` are those of the pipeline's places."""
    nodes = [rank // ranks_per_node for rank in ranks]
    return [
        nodes[layout.rank_of(stage)] != nodes[layout.rank_of(min(stage + 1, layout.num_stages - 1))]
        for stage in range(layout.num_stages)
    ]
