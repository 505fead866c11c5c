"""Time and memory of the layouts of a searched run, and lower bounds on both that cost next to nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from math import inf, lcm, prod

from megatron.core.distributed.param_layout import ALIGNMENT, plan_buffers
from megatron.core.parallel_dims import ParallelDims
from megatron.core.param_meta import ParamMeta
from megatron.core.parts import update_ahead
from megatron.core.pipeline_parallel.actions import Lists
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.core.pipeline_parallel.stages import Stage, pipeline_stages, whole_model
from megatron.extensions.planner.activations import ActivationPlan, ActivationPlans, StageMemory, peak_of_actions
from megatron.extensions.planner.device_file import DeviceFile
from megatron.extensions.planner.dry_run.description import micro_batch_of
from megatron.extensions.planner.dry_run.memory import RankMemory, memory_of_ranks
from megatron.extensions.planner.memory import BufferBytes, buffer_bytes, states_of_rank
from megatron.extensions.planner.suggest.bounds import (
    PassTimes,
    StageParameters,
    ideal_seconds_of_a_sample,
    states_bound,
    step_bound,
)
from megatron.extensions.planner.suggest.layouts import Family, Layout, Pipeline, Saving
from megatron.extensions.planner.suggest.space import SearchedRun
from megatron.extensions.planner.time.data_parallel import DataParallel
from megatron.extensions.planner.time.replay import Network, PassEvents
from megatron.extensions.planner.time.step_time import PlannerCache, StageTimes, StepTime, part_times, predict_step
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import validate

ELEMENTS = 2**20
"""Elements of a shard of the matrix that tells what each element of a state takes: so many that padding is none."""


SAME_LAYERS = 0.98
"""Layers that compute more again, or weight gradients apart, take no less than this share of the time of those that do
not: kernels that are the same may follow each other in another order."""


FIRST_OF_EQUALS, FIRST_OF_OTHERS = 2, 5
"""The fullest rank is looked for among this many first ones and the last: the first holds fewer layers than the
second where the embedding counts as some, and dense layers often come before those with experts."""


class LayoutCosts:
    """Prices layouts. What layouts share is measured once."""

    def __init__(self, run: SearchedRun, device: DeviceFile, gpus_per_node: int) -> None:
        self.run, self.device, self.gpus_per_node = run, device, gpus_per_node
        self.cache, self.plans = PlannerCache(), ActivationPlans()
        self.known_times: dict[Family, list[StageTimes]] = {}
        self.slopes: dict[tuple[str, bool, Stage], StageMemory] = {}
        """(recomputation, split, stage) -> what a further sample of a micro-batch holds."""

        self._known_peaks: dict[Hashable, dict[int, int]] = {}
        self._planned: dict[Hashable, int] = {}
        self._exchanges: dict[Hashable, DataParallel] = {}
        self._stages: dict[PipelineLayout, list[Stage]] = {}

    # Exact

    def legal(self, config: RunConfig) -> bool:
        return not validate(config, self.run.world_size)

    def step(self, config: RunConfig) -> StepTime:
        """The predicted step. Raises ValueError as `predict_step`."""
        return predict_step(config, self.run.world_size, self.device, self.gpus_per_node, self.cache)

    def memory(self, config: RunConfig) -> list[RankMemory]:
        """By pipeline rank."""
        return memory_of_ranks(config, ParallelDims.from_config(config.parallel, self.run.world_size), self.plans)

    # Bounds on the time

    def family_bound(self, family: Family) -> float:
        """Seconds of a step below which no layout of the family can go: its products, attention and element-wise bytes
        at the device's best, shared evenly, and the collectives of layers that nothing hides."""
        seconds = self._ideal(1, family.recompute, family.split)
        tp, ep = family.tp, family.ep
        if family.cp > 1:  # rings of more ranks do no less than one of two
            seconds += max(0.0, 2 * self._ideal(2, "none", False) - self._ideal(1, "none", False))
        if tp > 1:  # a rank sends (t - 1) / t of what it sends for t = 2, twice
            seconds += tp * 2 * (tp - 1) / tp * self._exposed("tp_communication", 2, 1)
        if ep > 1 and self.run.given.parallel.pass_pair is None:
            seconds += (ep - 1) / ep * self._exposed("ep_communication", 1, 2)
        bound = self.run.space.global_batch_size / self.run.world_size * seconds
        plain = family.plain
        if plain != family and plain in self.known_times:
            more = self._ideal(1, family.recompute, family.split) - self._ideal(1, "none", False)
            more *= self.run.space.global_batch_size / self.run.world_size
            return max(bound, SAME_LAYERS * (self._mean_work(plain) + max(0.0, more)))
        return bound

    def _mean_work(self, family: Family) -> float:
        """Seconds that the layers of a family take of a step of each rank."""
        samples = self.run.space.global_batch_size / family.micro_batch * family.tp * family.cp
        return samples / self.run.world_size * sum(part.every.total for part in self.times(family))

    @cache  # noqa: B019
    def _ideal(self, cp: int, recompute: str, split: bool) -> float:
        """Of one sample on one of `cp` ranks; 0 where that layout is illegal."""
        families = [Family(1, cp, 1, 1, samples, recompute, split) for samples in (1, 2)]
        if cp > 1 and not self._possible(families[0], cp):
            return 0.0
        one, two = map(self._events, families)
        return ideal_seconds_of_a_sample(one, two, self.device)

    def _events(self, family: Family) -> list[PassEvents]:
        batch = micro_batch_of(self._probe(family))
        return self.cache.parts_of(batch, [whole_model(batch.model)])[0]

    @cache  # noqa: B019
    def _exposed(self, subject: str, tp: int, ep: int) -> float:
        """Seconds of a subject in all layers, for one sample on links without latency; 0 where that is illegal."""
        family = Family(tp, 1, ep, tp, 1, "none", False)
        config, ranks = self._probe(family), tp * ep
        if not self._possible(family, ranks):
            return 0.0
        links = {name: replace(link, latency_us=0.0, launch_us=0.0) for name, link in self.device.links.items()}
        times = part_times(config, ranks, replace(self.device, links=links), ranks, self.cache)
        return sum(part.every.get(subject, 0.0) for part in times)

    @cache  # noqa: B019
    def divides(self, tp: int, cp: int, ep: int, expert_tp: int) -> bool:
        """Whether a model cut so has a legal layout, whatever the batch and the pipeline."""
        return self._possible(Family(tp, cp, ep, expert_tp, 1, "none", False), lcm(tp * cp, ep * expert_tp))

    def _possible(self, family: Family, ranks: int) -> bool:
        """Whether a family has a legal layout on this number of ranks, whatever the batch."""
        config = self._probe(family)
        parallel = replace(config.parallel, data_parallel_size=None)
        training = replace(config.training, global_batch_size=None, num_microbatches=None, rampup_batch_size=None)
        return not validate(replace(config, parallel=parallel, training=training), ranks)

    def _probe(self, family: Family) -> RunConfig:
        """A layout of a family without pipeline stages, for its layers alone."""
        config = self.run.with_layout(Layout(family, Pipeline("1f1b", 1, 1), 1))
        schedule = next(kind.name for kind in self.run.space.schedules if kind.split) if family.split else "1f1b"
        return replace(config, parallel=replace(config.parallel, pipeline_schedule=schedule))

    def times(self, family: Family) -> list[StageTimes]:
        """Of the embedding, each layer and the head. Raises ValueError as `predict_step`."""
        if family not in self.known_times:
            probe = self._probe(family)
            times = part_times(probe, self.run.world_size, self.device, self.gpus_per_node, self.cache)
            self.known_times[family] = times
        return self.known_times[family]

    def time_bound(self, layout: Layout) -> float:
        """Seconds below which a layout's step cannot go, by the times of its layers and what its replicas exchange."""
        in_turns = self.run.given.parallel.pass_pair is not None
        parts = [_passes(part, in_turns) for part in self.times(layout.family)]
        sums = list(accumulate(parts[1:-1], PassTimes.plus, initial=PassTimes()))
        stages = []
        for stage in self.stages(layout):
            begin, end = (stage.layers[0], stage.layers[-1] + 1) if len(stage.layers) else (0, 0)
            total = PassTimes(*(b - a for a, b in zip(sums[begin], sums[end], strict=True)))
            total = total.plus(parts[0]) if stage.first else total
            stages.append(total.plus(parts[-1]) if stage.last else total)
        more = self._exchanged(layout, stages)
        if update_ahead(self.run.given.optimizer) is not None:  # steps overlap
            stages = [PassTimes(0.0, 0.0, stage.total) for stage in stages]
        return step_bound(stages, _pipeline_of(layout), self.microbatches(layout), more)

    def untimed_bound(self, layout: Layout, seconds: float) -> float:
        """Seconds below which a layout's step cannot go, before its layers are timed: by what its replicas exchange,
        beside passes whose bound on a step is `seconds`."""
        place, held = _pipeline_of(layout), self.stages(layout)
        if self.run.given.optimizer.freeze:  # nothing is said of frozen parameters
            return seconds
        ranks = [[held[stage] for stage in place.stages_of(rank)] for rank in range(place.pp)]
        each = [self._rank_elements(layout.family, own) for own in ranks]
        fewest = {expert: min(elements[expert] for elements in each) for expert in (False, True)}
        replicas, microbatches = self._replicas(layout), self.microbatches(layout)
        beside = seconds + replicas.least(fewest, inf, inf, microbatches)
        return max(beside, replicas.least(fewest, 0.0, 0.0, microbatches)) if self._passes_alone else beside

    @property
    def _passes_alone(self) -> bool:
        """Whether the passes of a rank follow each other. Those in turns with others, or across steps, are longer than
        what it waits for."""
        given = self.run.given
        ahead = update_ahead(given.optimizer) is not None
        return given.parallel.pass_pair is None and not ahead

    def _exchanged(self, layout: Layout, stages: Sequence[PassTimes]) -> list[float]:
        """Seconds by pipeline rank that gradients and parameters add at least to the passes of its stages."""
        place, held = _pipeline_of(layout), self.stages(layout)
        if self.run.given.optimizer.freeze:  # nothing is said of frozen parameters
            return [0.0] * place.pp
        replicas, microbatches, known = self._replicas(layout), self.microbatches(layout), self._passes_alone
        found: dict[Hashable, float] = {}
        result = []
        for rank in range(place.pp):
            own = place.stages_of(rank)
            elements = self._rank_elements(layout.family, [held[stage] for stage in own])
            forward = sum(stages[stage].forward for stage in own) if known else inf
            backward = sum(stages[stage].backward + stages[stage].weight for stage in own) if known else inf
            key = elements[False], elements[True], forward, backward
            if key not in found:
                found[key] = replicas.least(elements, forward, backward, microbatches)
            result.append(found[key])
        return result

    def _rank_elements(self, family: Family, stages: Sequence[Stage]) -> dict[bool, float]:
        """Parameters of a rank's stages at least, by whether they are experts': all cut like matrices."""
        held = [self._elements(stage) for stage in stages]
        dense, expert = sum(each.dense for each in held), sum(each.expert for each in held)
        return {False: dense / family.tp, True: expert / (family.ep * family.expert_tp)}

    def _replicas(self, layout: Layout) -> DataParallel:
        """What a layout's replicas exchange; micro-batches and schedules change none of it."""
        family, sharding = layout.family, layout.saving.sharding
        key = family.tp, family.cp, family.ep, family.expert_tp, layout.pipeline.ranks, layout.dp, sharding
        if key not in self._exchanges:
            config = self.run.with_layout(layout)
            network = Network(self.device, min(self.gpus_per_node, self.run.world_size))
            dims = ParallelDims.from_config(config.parallel, self.run.world_size)
            sections = config.parallel, config.ddp, config.optimizer
            self._exchanges[key] = DataParallel(*sections, dims, network, self.device)
        return self._exchanges[key]

    def microbatches(self, layout: Layout) -> int:
        return self.run.space.global_batch_size // (layout.dp * layout.family.micro_batch)

    # Bounds on the memory

    def stages(self, layout: Layout) -> list[Stage]:
        """What the stages of a layout hold."""
        place = _pipeline_of(layout)
        if place not in self._stages:
            parallel = self.run.with_layout(layout).parallel
            self._stages[place] = pipeline_stages(self.run.own.model, parallel)
        return self._stages[place]

    def memory_bound(self, layout: Layout) -> int:
        """Bytes that the fullest rank of a layout has at least: states in shards without padding, and activations of
        one rank's model divided evenly over TP and CP. It costs next to nothing."""
        family, place, stages = layout.family, _pipeline_of(layout), self.stages(layout)
        shards = layout.dp * family.cp
        expert_shards = max(1, shards * family.tp // (family.ep * family.expert_tp))
        each = tuple(self._bytes_each(layout.saving, *pair) for pair in ((shards, False), (expert_shards, True)))
        elements = [self._elements(stage) for stage in stages]
        states = states_bound(elements, place, (family.tp, family.ep * family.expert_tp), each)  # type: ignore[arg-type]
        for rank, peak in self._peaks(layout).items():
            states[rank] += peak
        return int(max(states))

    def close_memory_bound(self, layout: Layout, config: RunConfig) -> int:
        """The same with the states as they are planned, and whole units beside them where they are sharded."""
        return max(self._states(layout, config, rank) + peak for rank, peak in self._peaks(layout).items())

    def _states(self, layout: Layout, config: RunConfig, rank: int) -> int:
        """Bytes of states of a pipeline rank, and of the units in flight; micro-batches change none of it."""
        family = layout.family
        sizes = family.tp, family.cp, family.ep, family.expert_tp, layout.dp
        key = sizes, _pipeline_of(layout), layout.saving, rank
        if key not in self._planned:
            dims = ParallelDims.from_config(config.parallel, self.run.world_size)
            plan = states_of_rank(config.model, config.parallel, config.optimizer, config.ddp, dims, rank)
            self._planned[key] = plan.memory.total + plan.in_flight.total
        return self._planned[key]

    def _peaks(self, layout: Layout) -> dict[int, int]:
        """Bytes of activations that ranks hold at least which may be the fullest; sharding changes none of it."""
        family, pipeline = layout.family, layout.pipeline
        microbatches, offloads = min(self.microbatches(layout), 2 * pipeline.ranks), layout.saving.offload
        layers = family.recompute, family.split, family.micro_batch, family.tp * family.cp
        key = layers, pipeline, microbatches, offloads == "activations"
        if key not in self._known_peaks:
            held = [self._activations(layout, stage) for stage in self.stages(layout)]
            lists = _lists(pipeline, microbatches)
            first = range(min(pipeline.ranks, FIRST_OF_EQUALS if self._layers_alike else FIRST_OF_OTHERS))
            self._known_peaks[key] = {
                rank: peak_of_actions(lists[rank], held) for rank in sorted({*first, pipeline.ranks - 1})
            }
        return self._known_peaks[key]

    def _activations(self, layout: Layout, stage: Stage) -> StageMemory:
        family = layout.family
        if layout.saving.offload == "activations" and len(stage.layers):
            stage = Stage(stage.layers[:1], stage.first, stage.last)
        key = family.recompute, family.split, stage
        if key not in self.slopes:
            first, second = (self._plan(family, samples).stage(stage) for samples in (1, 2))
            self.slopes[key] = second - first
        slope, cut = self.slopes[key], family.tp * family.cp
        values = {name: max(0, getattr(slope, name)) * family.micro_batch // cut for name in MEASURED}
        return StageMemory(**values)

    def _plan(self, family: Family, samples: int) -> ActivationPlan:
        alone = Family(1, 1, 1, 1, samples, family.recompute, family.split)
        return self.plans.of(micro_batch_of(self._probe(alone)))

    @cached_property
    def _layers_alike(self) -> bool:
        return len(set(self.cache.alike(micro_batch_of(self._probe(Family(1, 1, 1, 1, 1, "none", False)))))) == 1

    @cached_property
    def _metas(self) -> list[ParamMeta]:
        return stage_metas(self.run.own.model)

    @cache  # noqa: B019
    def _elements(self, stage: Stage) -> StageParameters:
        metas = stage_metas(self.run.own.model, stage)
        sums = {expert: sum(meta.numel for meta in metas if meta.expert is expert) for expert in (False, True)}
        if stage.last and not stage.first and self.run.own.model.tied_embeddings:  # its copy may be the first stage's
            sums[False] -= sum(meta.numel for meta in metas if meta.role in ("embedding", "output"))
        return StageParameters(sums[False], sums[True])

    @cache  # noqa: B019
    def _bytes_each(self, saving: Saving, shards: int, expert: bool) -> float:
        """Bytes of states that each element of a large matrix takes on a rank."""
        config = self.run.with_layout(Layout(Family(1, 1, 1, 1, 1, "none", False), Pipeline("1f1b", 1, 1), 1, saving))
        found = [meta for meta in self._metas if meta.expert is expert and meta.matrix]
        found = [meta for meta in found if not config.optimizer.freezes(meta.name)]
        if not found or len(found) < len([meta for meta in self._metas if meta.expert is expert and meta.matrix]):
            return 0.0  # nothing is said of frozen parameters
        return _state_bytes(found[0], shards, config) / (shards * ELEMENTS)


MEASURED = ("kept", "for_weights", "forward", "backward", "weight", "weight_copies")


def _state_bytes(meta: ParamMeta, shards: int, config: RunConfig) -> int:
    """Of a matrix of `ELEMENTS` elements for each of `shards` ranks."""
    optimizer, ddp, parallel = config.optimizer, config.ddp, config.parallel
    shape = (shards * ELEMENTS // ALIGNMENT, ALIGNMENT)
    assert prod(shape) == shards * ELEMENTS
    buffers = plan_buffers([(meta, shape)], shards, shards, None, optimizer.group_of, (), False, ddp.shards_gradients)
    found: BufferBytes = buffer_bytes(
        buffers, parallel.params_dtype, parallel.main_dtype, optimizer, ddp.shards_parameters
    )
    if optimizer.whole_roles:  # states lie where the matrix is updated
        return found.parameters + found.gradients
    return found.total


def _passes(times: StageTimes, in_turns: bool) -> PassTimes:
    hidden = "ep_communication" if in_turns else ""
    return PassTimes(*(part.total - part.get(hidden, 0.0) for part in (times.forward, times.backward, times.weight)))


def _pipeline_of(layout: Layout) -> PipelineLayout:
    return PipelineLayout(layout.pipeline.ranks, layout.pipeline.chunks, layout.pipeline.v_shaped)


@lru_cache(maxsize=4096)
def _lists(pipeline: Pipeline, microbatches: int) -> Lists:
    return build_schedule(pipeline.schedule, pipeline.ranks, microbatches, pipeline.chunks)
