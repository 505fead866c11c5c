"""Memory of activations per rank, measured: stages run on fake tensors, and every storage they make is counted.

A stage is measured in parts: one layer of each distinct kind, each pair of kinds that follow each other, and the two
ends of the model. What layers keep adds up, a tensor that two neighbours share counted once, so a deep model costs no
more than its kinds. Tokens are routed evenly over experts, as there are no values to route by.

What a rank holds at once follows from the list of actions that it runs: a micro-batch's activations are there from F to
B, or to I, and from there to W what the weight gradients need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parts import linear_format
from megatron.core.pipeline_parallel.actions import Action, Kind, units
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulator import StageCosts, held_at_peak
from megatron.core.pipeline_parallel.stages import Stage, pipeline_layout, pipeline_stages
from megatron.core.transformer.recompute import Segment, recompute_segments
from megatron.extensions.planner.fake_stage import (
    FakeStages,
    MicroBatch,
    fake_stages,
    in_a_layer,
    nothing_offloaded,
    numbered_kinds,
    planned,
)
from megatron.extensions.planner.live_memory import LiveMemory

MEASURED_LAYERS = 3
"""Number of identical layers measured per recomputed group; each further one adds the same."""


@dataclass(frozen=True)
class BufferCounts:
    """Numbers of buffers by their bytes."""

    of_size: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, more: BufferCounts) -> BufferCounts:
        sizes = {**self.of_size, **more.of_size}
        return BufferCounts({size: self.of_size.get(size, 0) + more.of_size.get(size, 0) for size in sizes})

    def __rmul__(self, factor: int) -> BufferCounts:
        return BufferCounts({size: factor * number for size, number in self.of_size.items()})


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one micro-batch on one stage."""

    kept: int = 0
    """From the forward pass to the backward: saved activations, and the input that the executor holds."""

    for_weights: int = 0
    """Between I and W, where the schedule has these."""

    forward: int = 0
    """The most there is at once during F."""

    backward: int = 0
    """During B, or I: what is kept included."""

    weight: int = 0
    """During W: what was left for it included."""

    weight_copies: int = 0
    """fp8 copies of weights, made once a step for all micro-batches."""

    offloaded: int = 0
    """On the host from the forward pass to the backward, and not in `kept`."""

    host: BufferCounts = field(default_factory=BufferCounts)
    """The host's buffers for it, by size."""

    def __add__(self, more: StageMemory) -> StageMemory:
        return StageMemory(*(a + b for a, b in zip(vars(self).values(), vars(more).values(), strict=True)))

    def __mul__(self, factor: int) -> StageMemory:
        return StageMemory(*(factor * value for value in vars(self).values()))

    def __sub__(self, less: StageMemory) -> StageMemory:
        return self + less * -1


@dataclass(frozen=True)
class _Unit:
    """Layers that are recomputed together, or one that keeps its own activations."""

    layers: tuple[int, ...]
    recompute: bool
    offload: bool


class ActivationPlan:
    """What stages of one configuration hold of a micro-batch; each distinct part is measured once."""

    def __init__(self, batch: MicroBatch, plans: ActivationPlans | None = None) -> None:
        """`plans` keep what other configurations with the same layers take."""
        self.batch, self._plans = batch, plans or ActivationPlans()
        self._kinds = numbered_kinds(batch, self._plans.kinds)
        self._batches = {True: batch, False: nothing_offloaded(batch)}
        """By whether a part offloads: what does not is the same whatever other layers do."""
        self._of_layer = {offloads: in_a_layer(each) for offloads, each in self._batches.items()}
        self._measured = {
            offloads: self._plans.measured.setdefault(each, {}) for offloads, each in self._of_layer.items()
        }

    def stage(self, stage: Stage) -> StageMemory:
        """The memory of one stage; peaks are to the byte where its layers are of one kind."""
        segments = recompute_segments(self.batch.model, len(stage.layers), self.batch.parallel.offloaded_layers)
        units = [
            _Unit(tuple(stage.layers[i] for i in segment.layers), segment.recompute, segment.offload)
            for segment in segments
        ]
        if len(units) < 2:
            return self._part(units, stage.first, stage.last)
        parts = [self._part(units[:1], stage.first, False)]
        parts += [self._part(pair, False, False) - self._part(pair[:1], False, False) for pair in pairwise(units)]
        parts.append(self._part(units[-1:], False, stage.last) - self._part(units[-1:], False, False))
        return self._with_peaks(sum(parts, StageMemory()), units, stage, parts)

    def _with_peaks(
        self, total: StageMemory, units: Sequence[_Unit], stage: Stage, parts: Sequence[StageMemory]
    ) -> StageMemory:
        """`total` with the peaks of a stage that runs its parts one after the other. What the part before has offloaded
        is on the device too: in the forward pass not yet let go of, in the backward fetched ahead."""
        forward, backward, weight = [0], [0], [0]
        kept, below, before = 0, total.for_weights, 0
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

    def _part(self, units: Sequence[_Unit], first: bool, last: bool) -> StageMemory:
        """A stage of these units, measured unless one like it has been."""
        alike = tuple((tuple(self._kinds[n] for n in unit.layers), unit.recompute, unit.offload) for unit in units)
        key = alike, first, last
        offloads = any(unit.offload for unit in units)
        measured = self._measured[offloads]
        if key not in measured:
            long = self._long(units, first, last)
            measured[key] = long or _measure(self._batches[offloads], units, first, last)
        return measured[key]

    def _long(self, units: Sequence[_Unit], first: bool, last: bool) -> StageMemory | None:
        """The same for a unit of many equal layers, from what a few of them take."""
        for number, unit in enumerate(units):
            more = len(unit.layers) - MEASURED_LAYERS
            if more > 0 and len({self._kinds[n] for n in unit.layers}) == 1:
                shorter = [
                    replace(unit, layers=unit.layers[:count]) for count in (MEASURED_LAYERS, MEASURED_LAYERS - 1)
                ]
                before, after = units[:number], units[number + 1 :]
                few, fewer = (self._part([*before, part, *after], first, last) for part in shorter)
                return few + (few - fewer) * more
        return None


def _measure(batch: MicroBatch, units: Sequence[_Unit], first: bool, last: bool) -> StageMemory:
    layers = [number for unit in units for number in unit.layers]
    segments, start = [], 0
    for unit in units:
        segments.append(Segment(range(start, start + len(unit.layers)), unit.recompute, unit.offload))
        start += len(unit.layers)

    def measured(meta: bool) -> StageMemory:
        with fake_stages(batch, meta) as fakes:
            return measure(fakes, layers, segments, first, last)

    return planned(batch, measured)


def measure(
    fakes: FakeStages, layers: Sequence[int], segments: Sequence[Segment], first: bool, last: bool
) -> StageMemory:
    """Runs one micro-batch through a stage and back, as the executor does, and counts."""
    stage = fakes.build(layers, first, last, segments)
    with fakes.casts.kept():
        if linear_format(fakes.parallel) is not None:  # the first micro-batch makes the copies of weights
            _run(fakes, stage)
        return replace(_run(fakes, stage), weight_copies=fakes.casts.nbytes)


def _run(fakes: FakeStages, stage: GPTModel) -> StageMemory:
    peak, held = dict[str, int](), dict[str, int]()
    with LiveMemory() as live:
        fakes.live = live
        for part in fakes.passes(stage):
            peak[part], held[part] = live.peak, live.now
            live.restart_peak()
    peaks = peak["forward"], peak["backward"], peak["weight"]
    return StageMemory(held["sent"], held["done"], *peaks, 0, fakes.offloaded, BufferCounts(Counter(fakes.on_host)))


@dataclass(frozen=True)
class RankActivations:
    """What each rank at one place of the pipeline holds at most of a step's activations."""

    stages: tuple[StageMemory, ...]
    """Of one micro-batch, by chunk."""

    in_flight: tuple[int, ...]
    """Micro-batches whose activations are held at the peak, by chunk."""

    peak: int
    """Bytes kept at once between two actions."""

    working: int
    """What the largest action takes beside: gradients and temporary tensors. Buffers of collectives are in it, what a
    kernel takes and gives back is not."""

    weight_copies: int = 0
    """Bytes of weights in fp8."""

    host: int = 0
    """Bytes of the host's buffers for offloaded activations, of all micro-batches that are in flight."""

    @property
    def total(self) -> int:
        return self.peak + self.weight_copies + self.working


class ActivationPlans:
    """Plans of many configurations; those whose layers do the same share what is measured."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, ActivationPlan] = {}
        self.measured: dict[MicroBatch, dict[Hashable, StageMemory]] = {}
        self.kinds: dict[Hashable, list[int]] = {}

    def of(self, batch: MicroBatch) -> ActivationPlan:
        key = in_a_layer(batch), batch.parallel.offloaded_layers
        if key not in self._plans:
            self._plans[key] = ActivationPlan(batch, self)
        return self._plans[key]


def activations_of_ranks(
    batch: MicroBatch, microbatches: int, plans: ActivationPlans | None = None
) -> list[RankActivations]:
    """By pipeline rank, for steps of this number of micro-batches. `plans` keeps what is measured between calls."""
    model, parallel = batch.model, batch.parallel
    layout, plan = pipeline_layout(model, parallel), (plans or ActivationPlans()).of(batch)
    stages = [plan.stage(stage) for stage in pipeline_stages(model, parallel)]
    share = [stage.for_weights / max(1, stage.kept) for stage in stages]
    costs = StageCosts(activation=[stage.kept for stage in stages], kept_for_weight_grad=share)
    found = []
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    in_turns = parallel.pass_pair is not None
    lists = build_schedule(parallel.schedule, layout.pp, microbatches, layout.chunks, group, in_turns)
    for rank, actions in enumerate(lists):
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
    """The most bytes there are at once while a rank runs its list. Two passes that run in turns may both be at their
    peaks."""
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
    """Bytes of the host's buffers after a rank has run its list: of each size the most that were taken at once. Of two
    passes that run in turns, the backward is taken to give back none before the forward has taken all."""
    held, most = Counter[int](), Counter[int]()
    for unit in units(actions):
        for _, stage, _ in (action for action in unit if action.kind is Kind.F):
            held.update(stages[stage].host.of_size)
        most |= held
        for _, stage, _ in (action for action in unit if action.kind in (Kind.B, Kind.I)):
            held.subtract(stages[stage].host.of_size)
    return sum(size * number for size, number in most.items())
