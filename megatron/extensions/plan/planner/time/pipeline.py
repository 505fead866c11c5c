"""Compute the pipeline time by simulating the schedule's own action lists with the times of each stage. This module
does not import torch.

After its warm-up, a schedule repeats itself every p micro-batches. The time of a step with many micro-batches is
therefore extrapolated from two shorter steps that differ by p micro-batches. Every further round of p micro-batches
adds the difference between the times of these two steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.pipeline_parallel.actions import Action, Kind, Lists
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, build_schedule
from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages
from megatron.core.pipeline_parallel.walk import TIMED
from megatron.extensions.plan.simulator.simulator import Simulation, StageCosts, at_stage, lists_of_steps, simulate
from megatron.training.config.run_config import RunConfig
from megatron.training.step_parts import late_update, runs_passes_in_turns

ROUNDS = 3
"""Maximum number of rounds that are simulated. A round has p micro-batches; steps with more rounds are extrapolated."""


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule, with a name that `build_schedule` accepts."""

    name: str
    layout: PipelineLayout
    group: int | None = None
    in_turns: bool = False
    validates: bool = False
    """True if a run updates parameters before the gradient norm is known, so that no rank waits for the other ranks
    between two steps. `times` then returns the time between the ends of consecutive steps."""

    flows: bool = False
    """True if each step starts before the previous step ends. `times` then returns the time between the ends of
    consecutive steps."""

    tied: bool = False
    """True if the first and last rank sum the gradients of shared weights at the end of a step."""

    @classmethod
    def of(cls, parallel: ModelParallelConfig, layout: PipelineLayout) -> Schedule:
        """Create the schedule of a configuration, for a single isolated step."""
        group = parallel.microbatch_group_size_per_virtual_pipeline_stage
        return cls(parallel.schedule, layout, group, runs_passes_in_turns(parallel))

    @classmethod
    def of_run(cls, config: RunConfig) -> Schedule:
        """Create the schedule of a whole run, in which consecutive steps may overlap.

        Under a schedule without flushes, passes of a step start before the previous step ends, unless every step is
        logged (--log-interval 1).
        """
        alone = cls.of(config.parallel, pipeline_layout(config.model, config.parallel))
        flushes, tied = PIPELINE_SCHEDULES.facts(alone.name).flushes, bool(tied_stages(config.model, alone.layout))
        flows = not flushes and config.logging.log_interval > 1
        validates = late_update(config) is not None and not (tied or flows)
        return replace(alone, validates=validates, flows=flows, tied=tied)

    def lists(self, microbatches: int, messages: bool = False) -> Lists:
        """Return the action list of each pipeline rank for one step. If `validates` is True, the lists contain the
        VALIDATE action, at which ranks wait for the end of the previous step.

        If `validates` or `messages` is True, the action lists are checked and include messages.
        """
        shape = self.name, self.layout.pp, microbatches, self.layout.chunks
        if messages or self.validates:
            return pipeline_lists(*shape, False, self.group, self.in_turns, self.validates)
        return build_schedule(*shape, self.group, self.in_turns)

    def times(self, costs: StageCosts, microbatches: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Predict a step of `microbatches` micro-batches. Return two tuples with one value per pipeline rank: the times
        at which the last actions of the ranks end, and the parts of these times that are due to messages."""
        ends = self._ends(costs, microbatches)
        alone = self._ends(replace(costs, comm=0.0), microbatches)
        return ends, tuple(max(0.0, a - b) for a, b in zip(ends, alone, strict=True))

    def _ends(self, costs: StageCosts, microbatches: int) -> tuple[float, ...]:
        turn = max(self.layout.pp, self.group or 0)
        rounds, rest = divmod(microbatches, turn)
        if rounds <= ROUNDS:
            return self._simulated(costs, microbatches)
        few, more = (self._simulated(costs, n * turn + rest) for n in (ROUNDS - 1, ROUNDS))
        # If stages are uneven, the other ranks eventually wait for the busiest rank. Each round then takes as long as
        # the work of the busiest rank.
        longest = turn * max(self._work(costs, rank) for rank in range(self.layout.pp))
        return tuple(b + (rounds - ROUNDS) * max(b - a, longest) for a, b in zip(few, more, strict=True))

    def _work(self, costs: StageCosts, rank: int) -> float:
        """Return the computation time of one micro-batch on a rank."""
        passes = (costs.forward, costs.input_grad, costs.weight_grad)
        return sum(at_stage(times, stage) for times in passes for stage in self.layout.stages_of(rank))

    def _simulated(self, costs: StageCosts, microbatches: int) -> tuple[float, ...]:
        if (steady := self._steady(costs, microbatches)) is not None:
            return (steady[0],) * self.layout.pp
        found = simulate(self.lists(microbatches), costs)
        return tuple(max(timed.stop for timed in timeline) for timeline in found.timeline)

    def _steady(self, costs: StageCosts, microbatches: int) -> tuple[float, float] | None:
        """Return (time of a step, its idle share) if the steps of the run overlap; otherwise, return None."""
        if self.flows:
            return unflushed(self.name, self.layout.pp, microbatches, costs, self.tied)
        return post_validated(self.lists(microbatches), costs) if self.validates else None

    def bubble(self, costs: StageCosts, microbatches: int) -> float:
        """Return the idle share of a step."""
        steady = self._steady(costs, microbatches)
        return simulate(self.lists(microbatches), costs).bubble if steady is None else steady[1]


STEPS = 4
"""Number of steps simulated in sequence. The step time is the difference between the end times of the last two
steps."""


def consecutive(lists: Lists, steps: int) -> Lists:
    """Concatenate the action lists of several steps, with consecutive micro-batch numbers."""
    m = 1 + max(action.microbatch for actions in lists for action in actions)
    return [
        [action._replace(microbatch=action.microbatch + step * m) for step in range(steps) for action in actions]
        for actions in lists
    ]


def post_validated(lists: Lists, costs: StageCosts | None = None) -> tuple[float, float]:
    """Return (step time, idle share of the step) in the steady state of a run that updates parameters before the
    gradient norm is known.

    `lists` contains the action lists of one step. At the VALIDATE action, each rank waits until all ranks have ended
    the previous step. In lists without the VALIDATE action, no rank waits (arXiv 2401.10241, section 4, and section 5.2
    for the bubble), unless the first and the last rank share weights. The first and the last rank sum the gradients of
    the shared weights, so they end a step together. The ranks between them then also wait, because they need the
    results of the first rank's forward passes.
    """
    m = 1 + max(action.microbatch for actions in lists for action in actions)
    return _of_step(simulate(consecutive(lists, STEPS), costs), m, STEPS)


def unflushed(
    schedule: str, p: int, microbatches: int, costs: StageCosts | None = None, tied: bool = False
) -> tuple[float, float]:
    """Return (step time, idle share of the step) for a schedule without pipeline flushes, in the steady state.

    If `tied` is True, the first and the last rank share weights. At the end of each step, the last rank then waits for
    the first rank.
    """
    lists = lists_of_steps(schedule, p, [microbatches] * STEPS)
    if tied and p > 1:
        last = []
        for action in lists[-1]:
            last.append(action)
            if action.kind is Kind.SEND_B and (action.microbatch + 1) % microbatches == 0:
                last.append(Action(Kind.VALIDATE, action.stage, action.microbatch + 1))
        lists[-1] = last
    return _of_step(simulate(lists, costs), microbatches, STEPS - 1)


def _of_step(found: Simulation, microbatches: int, number: int) -> tuple[float, float]:
    """Return (time, idle share) of step `number`, counted from 1, of the `STEPS` simulated steps."""
    time = _end(found, number * microbatches) - _end(found, (number - 1) * microbatches)
    return time, 1 - sum(found.busy) / STEPS / len(found.busy) / time


def _end(found: Simulation, microbatches: int) -> float:
    """Return the time at which all ranks have finished the first `microbatches` micro-batches."""
    timed = (entry for timeline in found.timeline for entry in timeline if entry.action.kind in TIMED)
    return max(entry.stop for entry in timed if entry.action.microbatch < microbatches)
