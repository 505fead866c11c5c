"""Measure the activation memory per rank by running stages on fake tensors and counting every allocated storage.

A stage is measured in parts: one layer of each distinct kind, each pair of adjacent kinds, and the two ends of the
model. The sizes of the activations that the layers save are summed. A tensor that two adjacent layers share is counted
once. The cost of a plan therefore depends on the number of distinct kinds, not on the depth. Tokens are assumed to be
routed evenly over experts, because fake tensors have no values that could determine the routing.

A rank's action list determines how much memory it holds at each point of a step. The rank holds a micro-batch's
activations from its forward pass (F) to its backward pass (B). If the backward pass is split into input gradients (I)
and weight gradients (W), the rank holds all activations from F to I. From I to W, it holds only the activations that
weight gradients need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron.core.pipeline_parallel.actions import Action, Kind, units
from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.core.pipeline_parallel.layout import Stage
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.extensions.plan.planner.fake_stage import Part, PlannerCache, StageParts, Unit
from megatron.extensions.plan.planner.micro_batch import MicroBatch
from megatron.extensions.plan.planner.time.events import StageMemory
from megatron.extensions.plan.planner.time.pipeline import Schedule
from megatron.extensions.plan.simulator.simulator import StageCosts, held_at_peak

MEASURED_LAYERS = 3
"""Number of layers to measure if identical layers are recomputed together in a group. Each further layer adds the same
number of bytes."""


class ActivationPlan(StageParts):
    """Plan of the activation memory that one micro-batch takes in each pipeline stage."""

    def stage(self, stage: Stage) -> StageMemory:
        """Return the activation memory of one stage. The peaks are exact to the byte if all layers of the stage are
        identical."""
        units = self.units(stage)
        if len(units) < 2:
            return self._part(units, stage.first, stage.last)
        parts = [self._part(units[:1], stage.first, False)]
        parts += [self._part(pair, False, False) - self._part(pair[:1], False, False) for pair in pairwise(units)]
        parts.append(self._part(units[-1:], False, stage.last) - self._part(units[-1:], False, False))
        return self._with_peaks(sum(parts, StageMemory()), units, stage, parts)

    def _with_peaks(
        self, total: StageMemory, units: Sequence[Unit], stage: Stage, parts: Sequence[StageMemory]
    ) -> StageMemory:
        """Return `total`, which is the summed memory of a stage's parts, with corrected peaks. The parts run one after
        another, so the peak of the stage is not the sum of their peaks.

        While a part runs, the tensors that the previous part offloaded still count as device memory: the forward pass
        has not released them yet, and the backward pass prefetches them.
        """
        forward = [0]
        backward = [0]
        weight = [0]
        kept = 0
        below = total.for_weights
        before = 0
        for number, unit in enumerate(units):
            kept += parts[number].kept
            below -= parts[number].for_weights
            top = number == len(units) - 1
            alone = self._part([unit], stage.first and not number, stage.last and top)
            kept += parts[-1].kept if top else 0
            forward.append(kept + before + alone.forward - alone.kept)
            backward.append(kept + before + alone.backward - alone.kept + (0 if top else below))
            weight.append(total.for_weights + alone.weight - alone.for_weights)
            before = alone.offloaded
        return replace(total, forward=max(forward), backward=max(backward), weight=max(weight))

    def _part(self, units: Sequence[Unit], first: bool, last: bool) -> StageMemory:
        """Return the memory of a stage that consists of the given units. If a unit consists of many identical layers,
        its memory is extrapolated from a few of these layers."""
        for number, unit in enumerate(units):
            more = len(unit.layers) - MEASURED_LAYERS
            if more > 0 and len(set(self.kinds(unit))) == 1:
                shorter = [
                    unit._replace(layers=unit.layers[:count]) for count in (MEASURED_LAYERS, MEASURED_LAYERS - 1)
                ]
                before, after = units[:number], units[number + 1 :]
                few, fewer = (self._part([*before, part, *after], first, last) for part in shorter)
                return few + (few - fewer) * more
        return self.of([Part(tuple(units), first, last)])[0].memory


@dataclass(frozen=True)
class RankActivations:
    """Peak activation memory of the ranks at one pipeline position during a step."""

    stages: tuple[StageMemory, ...]
    """Memory of one micro-batch in each stage of the rank."""

    in_flight: tuple[int, ...]
    """Number of micro-batches whose activations are held at the peak, for each stage of the rank."""

    peak: int
    """Peak number of bytes held between two actions."""

    working: int
    """Peak memory that a single action takes for gradients and temporary tensors, in addition to the held activations.
    This memory includes communication buffers, but not memory that a kernel allocates and frees internally."""

    weight_copies: int = 0
    """Bytes of fp8 weight copies."""

    host: int = 0
    """Size in bytes of the host buffers that hold the offloaded activations of all micro-batches in flight."""


def activations_of_ranks(
    batch: MicroBatch, microbatches: int, cache: PlannerCache | None = None
) -> list[RankActivations]:
    """Return the activation memory of each pipeline rank in a step of `microbatches` micro-batches.

    `cache` keeps measurements between calls.
    """
    model, parallel = batch.model, batch.parallel
    layout, plan = pipeline_layout(model, parallel), ActivationPlan(batch, cache)
    stages = [plan.stage(stage) for stage in pipeline_stages(model, parallel)]
    share = [stage.for_weights / max(1, stage.kept) for stage in stages]
    costs = StageCosts(activation=[stage.kept for stage in stages], kept_for_weight_grad=share)
    found = []
    for rank, actions in enumerate(Schedule.of(parallel, layout).lists(microbatches)):
        own = layout.stages_of(rank)
        peak, held = held_at_peak(actions, costs)
        highest = peak_of_actions(actions, stages)
        found.append(
            RankActivations(
                tuple(stages[stage] for stage in own),
                tuple(held.get(stage, 0) for stage in own),
                round(peak),
                max(0, highest - round(peak)),
                sum(stages[stage].weight_copies for stage in own),
                host_of_actions(actions, stages),
            )
        )
    return found


def peak_of_actions(actions: Sequence[Action], stages: Sequence[StageMemory]) -> int:
    """Return the peak memory in bytes while a rank runs its action list. The peaks of two interleaved passes are added,
    because both passes may reach their peaks at the same time."""
    held = highest = 0
    for unit in units(actions):
        working = change = 0
        for kind, stage, _ in unit:
            if kind is not Kind.FB:
                memory = stages[stage]
                before, during, after = {
                    Kind.F: (0, memory.forward, memory.kept),
                    Kind.B: (memory.kept, memory.backward, 0),
                    Kind.I: (memory.kept, memory.backward, memory.for_weights),
                    Kind.W: (memory.for_weights, memory.weight, 0),
                }[kind]
                working += during - before
                change += after - before
        highest = max(highest, held + working)
        held += change
    return highest


def host_of_actions(actions: Sequence[Action], stages: Sequence[StageMemory]) -> int:
    """Return the total size in bytes of the host buffers that a rank needs to run its action list. For each buffer
    size, the rank needs the maximum number of buffers in use at once.

    If two passes are interleaved, the result assumes that the backward pass releases no buffer before the forward pass
    has allocated all of its buffers.
    """
    held, most = Counter[int](), Counter[int]()
    for unit in units(actions):
        for _, stage, _ in (action for action in unit if action.kind is Kind.F):
            held.update(stages[stage].host.of_size)
        most |= held
        for _, stage, _ in (action for action in unit if action.kind in (Kind.B, Kind.I)):
            held.subtract(stages[stage].host.of_size)
    return sum(size * number for size, number in most.items())
