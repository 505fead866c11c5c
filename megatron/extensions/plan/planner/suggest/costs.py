"""Compute the time and memory of the layouts in a search, and cheap lower bounds on the time and memory.

A bound may omit costs but never adds any, so no optimal layout is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import inf, lcm

import numpy as np

from megatron.core.distributed.param_layout import ALIGNMENT, plan_buffers
from megatron.core.parallel_dims import ParallelDims
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.core.pipeline_parallel.layout import PipelineLayout, Stage
from megatron.core.pipeline_parallel.schedules import build_schedule, splits_backward
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.core.pipeline_parallel.stages import whole_model
from megatron.extensions.plan.planner.activations import ActivationPlan, peak_of_actions
from megatron.extensions.plan.planner.device_file import DeviceFile
from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.loss_chunks import ChunkChoice, chosen_chunk
from megatron.extensions.plan.planner.memory import (
    DTYPE_BYTES,
    RankMemory,
    buffer_bytes,
    chain_bytes,
    memory_of_ranks,
    states_of_rank,
)
from megatron.extensions.plan.planner.micro_batch import MicroBatch
from megatron.extensions.plan.planner.suggest.space import RECOMPUTATION, Family, Layout, Pipeline, Saving, SearchedRun
from megatron.extensions.plan.planner.time.events import Kernel, PassEvents, StageMemory
from megatron.extensions.plan.planner.time.replay import Network, Replay
from megatron.extensions.plan.planner.time.step_time import (
    StageTimes,
    Step,
    StepTime,
    predict_step,
)
from megatron.training.config.flags import named_value
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import validate
from megatron.training.step_parts import late_update, runs_passes_in_turns

ELEMENTS = 2**20
"""Number of elements per shard of the matrix that is used to compute the bytes of state per element. Shards of this
size need no padding."""

FULLEST = 5
"""Number of pipeline ranks, counted from the first, whose memory is computed to find the fullest rank, which is the
rank that needs the most memory. The last rank is also checked.

The first rank need not be the fullest: it holds fewer layers than the second rank if the embedding counts as a layer,
and dense layers often precede MoE layers.
"""

SAME_LAYERS = 0.98
"""Assumed lower bound on the relative time of layers with recomputation or deferred weight gradients. Their time is
divided by the time of the same layers without recomputation and without deferred weight gradients.

The ratio is below 1 because the same kernels may run in a different order.
"""

lists_of = lru_cache(maxsize=4096)(build_schedule)


class LayoutCosts:
    """Predicted time and memory of layouts. Measurements that several layouts share are made only once."""

    def __init__(self, run: SearchedRun, device: DeviceFile, gpus_per_node: int) -> None:
        self.run = run
        self.device = device
        self.gpus_per_node = gpus_per_node
        self.cache, self._times = PlannerCache(), dict[Family, list[StageTimes]]()

    # Exact

    def legal(self, config: RunConfig) -> bool:
        return not validate(config, self.run.world_size)

    def step(self, config: RunConfig) -> StepTime:
        """Predict a training step under a configuration. Raises ValueError if the device file lacks a rate that the
        step needs."""
        return predict_step(config, self.run.world_size, self.device, self.gpus_per_node, self.cache)

    def memory(self, config: RunConfig) -> list[RankMemory]:
        """Return the planned memory of each pipeline rank."""
        return memory_of_ranks(config, self.run.world_size, self.cache)

    def chunked(self, config: RunConfig, step: StepTime, memory: Sequence[RankMemory]) -> ChunkChoice | None:
        """Return the best chunk size for the output head and the loss, with its effect on the plan; None if chunks save
        no memory."""
        return chosen_chunk(config, self.run.world_size, step, memory, self.step, self.memory)

    # Bounds on the time

    def family_bound(self, family: Family) -> float:
        """Return a lower bound, in seconds, on the step time of all layouts in a family.

        The bound is the sum of the computation time, the time of the layers' exposed collectives, and the fixed time of
        a step. The computation time covers the layers' matrix products, attention and element-wise operations, at the
        device's best rates and evenly distributed over the ranks.
        """
        seconds = self._ideal(1, family.recompute, family.split)
        tp, ep = family.tp, family.ep
        if family.cp > 1:  # a larger ring takes at least as long as a ring of two ranks
            seconds += max(0.0, 2 * self._ideal(2, "none", False) - self._ideal(1, "none", False))
        if tp > 1:  # with t ranks, a rank sends 2 (t - 1) / t times as much as with 2 ranks
            seconds += tp * 2 * (tp - 1) / tp * self._exposed("tp_communication", 2, 1)
        if ep > 1 and not runs_passes_in_turns(self.run.given):
            seconds += (ep - 1) / ep * self._exposed("ep_communication", 1, 2)
        bound = self.run.space.global_batch_size / self.run.world_size * seconds + self._fixed
        plain = family._replace(recompute=RECOMPUTATION[0], split=False)
        if plain not in self._times or plain == family:
            return bound
        more = self._ideal(1, family.recompute, family.split) - self._ideal(1, plain.recompute, plain.split)
        more *= self.run.space.global_batch_size / self.run.world_size
        return max(bound, self._fixed + SAME_LAYERS * (self._mean_work(plain) + max(0.0, more)))

    @property
    def _fixed(self) -> float:
        """Return the part of the step time, in seconds, that does not depend on the layout."""
        return self.device.fixed_ms(self.run.world_size) / 1e3

    def _mean_work(self, family: Family) -> float:
        """Return the time in seconds that the layers of a family take in a step, averaged over the ranks."""
        samples = self.run.space.global_batch_size / family.micro_batch * family.tp * family.cp
        return samples / self.run.world_size * sum(part.every.total for part in self.times(family))

    def untimed_bound(self, layout: Layout, seconds: float) -> float:
        """Return a lower bound on a layout's step time in seconds, before its layers are timed.

        `seconds` is a lower bound on the time of the passes. The result also includes a lower bound on the exposed
        communication time among replicas.
        """
        if named_value(self.run.given, "freeze"):  # no lower bound is known for frozen parameters
            return seconds
        each, microbatches = self._elements_of_ranks(layout), self.microbatches(layout)
        fewest = {expert: min(elements[expert] for elements in each) for expert in (False, True)}
        step = self._replicas(layout)
        beside = seconds + step.least_exchanged(fewest, inf, inf, microbatches)
        return max(beside, step.least_exchanged(fewest, 0.0, 0.0, microbatches)) if self._passes_alone else beside

    @property
    def _passes_alone(self) -> bool:
        """Return True if a rank's passes run one after another.

        The result is False if the passes of two micro-batches are interleaved, or if steps overlap. A pass that runs at
        the same time as another pass takes longer, and hides more communication.
        """
        return not runs_passes_in_turns(self.run.given) and late_update(self.run.given) is None

    @cache  # noqa: B019
    def _ideal(self, cp: int, recompute: str, split: bool) -> float:
        """Return a lower bound, in seconds, on the time that each of `cp` context-parallel ranks needs for one sample;
        0 if the context-parallel size is illegal."""
        families = [Family(1, cp, 1, 1, samples, recompute, split) for samples in (1, 2)]
        if cp > 1 and not self._possible(families[0], cp):
            return 0.0
        batches = [MicroBatch.of(self._probe(family)) for family in families]
        one, two = (self.cache.parts_of(batch, [whole_model(batch.model)])[0] for batch in batches)
        return ideal_seconds_of_a_sample(one, two, self.device)

    @cache  # noqa: B019
    def _exposed(self, subject: str, tp: int, ep: int) -> float:
        """Return the seconds that all layers spend in one category of time (`subject`) for one sample, on links without
        latency. Return 0 if the parallel sizes are illegal."""
        family, ranks = Family(tp, 1, ep, tp), tp * ep
        if not self._possible(family, ranks):
            return 0.0
        links = {name: replace(link, latency_us=0.0, launch_us=0.0) for name, link in self.device.links.items()}
        step = Step(self._probe(family), ranks, replace(self.device, links=links), ranks, self.cache)
        return sum(part.every.get(subject, 0.0) for part in step.part_times())

    @cache  # noqa: B019
    def divides(self, tp: int, cp: int, ep: int, expert_tp: int) -> bool:
        """Return True if a legal layout with these parallel sizes exists for some batch size and some pipeline."""
        return self._possible(Family(tp, cp, ep, expert_tp), lcm(tp * cp, ep * expert_tp))

    def _possible(self, family: Family, ranks: int) -> bool:
        """Return True if a family has a legal layout on this number of ranks, regardless of the batch size."""
        config = self._probe(family)
        parallel = replace(config.parallel, data_parallel_size=None)
        training = replace(config.training, global_batch_size=None, num_microbatches=None)
        config = replace(config.without("rampup_batch_size"), parallel=parallel, training=training)
        return not validate(config, ranks)

    def _probe(self, family: Family) -> RunConfig:
        """Return the family's configuration without pipeline parallelism. This configuration is used to time the
        family's layers."""
        config = self.run.with_layout(Layout(family))
        schedule = next(filter(splits_backward, self.run.space.schedules)) if family.split else "1f1b"
        return replace(config, parallel=replace(config.parallel, pipeline_schedule=schedule))

    def times(self, family: Family) -> list[StageTimes]:
        """Return the times of the embedding, each layer and the output layer. Raises ValueError if the device file
        lacks a rate that the prediction needs."""
        if family not in self._times:
            config = self._probe(family)
            step = Step(config, self.run.world_size, self.device, self.gpus_per_node, self.cache)
            self._times[family] = step.part_times()
        return self._times[family]

    def time_bound(self, layout: Layout) -> float:
        """Return a lower bound, in seconds, on a layout's step time. The bound is computed from the times of the layers
        and the fixed time of a step."""
        hidden = "ep_communication" if runs_passes_in_turns(self.run.given) else ""
        parts = np.array(
            [
                [spent.total - spent.get(hidden, 0.0) for spent in (part.forward, part.backward, part.weight)]
                for part in self.times(layout.family)
            ]
        )
        stages = np.array(
            [
                parts[[layer + 1 for layer in stage.layers]].sum(0) + parts[0] * stage.first + parts[-1] * stage.last
                for stage in self.stages(layout.pipeline)
            ]
        )
        more = self._exchanged(layout, stages if self._passes_alone else np.full_like(stages, inf))
        if late_update(self.run.given) is not None:  # steps overlap
            stages = np.array([[0.0, 0.0, total] for total in stages.sum(1)])
        return step_bound(stages, layout.place, self.microbatches(layout), more) + self._fixed

    def _exchanged(self, layout: Layout, stages: np.ndarray) -> list[float]:
        """Return a list with a lower bound for each pipeline rank: the minimum exposed time, in seconds, of gradient
        and parameter exchanges. `stages` contains the pass times of each stage."""
        if named_value(self.run.given, "freeze"):  # no lower bound is known for frozen parameters
            return [0.0] * layout.pipeline.ranks
        step = self._replicas(layout)
        passes = (stages[list(layout.place.stages_of(rank))].sum(0) for rank in range(layout.pipeline.ranks))
        return [
            step.least_exchanged(elements, forward, backward + weight, self.microbatches(layout))
            for elements, (forward, backward, weight) in zip(self._elements_of_ranks(layout), passes, strict=True)
        ]

    def _replicas(self, layout: Layout) -> Step:
        """Return a `Step` with which the communication time among a layout's replicas is predicted. This time depends
        neither on the schedule nor on the micro-batch."""
        family, pipeline = Family(*layout.family[:4]), Pipeline(ranks=layout.pipeline.ranks)
        return self._step(Layout(family, pipeline, layout.dp, Saving(layout.saving.sharding)))

    @cache  # noqa: B019
    def _step(self, layout: Layout) -> Step:
        return Step(self.run.with_layout(layout), self.run.world_size, self.device, self.gpus_per_node, self.cache)

    def microbatches(self, layout: Layout) -> int:
        return self.run.space.global_batch_size // (layout.dp * layout.family.micro_batch)

    # Bounds on the memory

    @cache  # noqa: B019
    def stages(self, pipeline: Pipeline) -> list[Stage]:
        """Return the stages of a pipeline, with their layers."""
        return pipeline_stages(self.run.own.model, self.run.with_layout(Layout(pipeline=pipeline)).parallel)

    def memory_bound(self, layout: Layout) -> int:
        """Return a cheap lower bound on the bytes of a layout's fullest rank.

        The bound includes states, sharded without padding, and activations, which are assumed to be divided evenly over
        TP and CP.
        """
        family, saving = layout.family, layout.saving
        shards = {False: layout.replicas}
        shards[True] = max(1, layout.replicas * family.tp // (family.ep * family.expert_tp))
        states = [
            sum(count * self._bytes_each(saving, shards[expert], expert) for expert, count in elements.items())
            for elements in self._elements_of_ranks(layout)
        ]
        for rank, peak in self._peaks_of(layout).items():
            states[rank] += peak
        return int(max(states))

    def close_memory_bound(self, layout: Layout) -> int:
        """Return a tighter lower bound than `memory_bound`, computed from the planned bytes of states. The bound
        includes units that are temporarily unsharded."""
        # the other settings of the family do not affect parameters and optimizer states
        family = Family(*layout.family[:4], split=layout.family.split)
        alike = layout._replace(family=family)
        return max(self._states(alike, rank) + peak for rank, peak in self._peaks_of(layout).items())

    @cache  # noqa: B019
    def _states(self, layout: Layout, rank: int) -> int:
        config = self.run.with_layout(layout)
        plan = states_of_rank(config, ParallelDims.from_config(config.parallel, self.run.world_size), rank)
        return plan.memory.total + plan.in_flight.total

    def _peaks_of(self, layout: Layout) -> dict[int, int]:
        family, pipeline = layout.family, layout.pipeline
        microbatches = min(self.microbatches(layout), 2 * pipeline.ranks)
        alone = Family(family.tp * family.cp, 1, 1, 1, *family[4:])
        return self._peaks(alone, pipeline, microbatches, layout.saving.offload == "activations")

    def _elements_of_ranks(self, layout: Layout) -> list[dict[bool, float]]:
        """Return lower bounds on the numbers of dense parameters (key False) and expert parameters (key True) of each
        pipeline rank. The bounds assume that tensor and expert parallelism shard all parameters."""
        held = [self._elements(stage) for stage in self.stages(layout.pipeline)]
        cut = {False: layout.family.tp, True: layout.family.ep * layout.family.expert_tp}
        own = (layout.place.stages_of(rank) for rank in range(layout.pipeline.ranks))

        def elements(stages: Sequence[int], expert: bool) -> float:
            return sum(held[stage][expert] for stage in stages) / cut[expert]

        return [{expert: elements(stages, expert) for expert in cut} for stages in own]

    @cache  # noqa: B019
    def _peaks(self, alone: Family, pipeline: Pipeline, microbatches: int, offloads: bool) -> dict[int, int]:
        """Return a lower bound on the activation bytes of each rank that may be the fullest.

        `alone` is a family without CP and EP. The TP size of this family is the number of ranks that share the
        activations of a layer.
        """
        held = [self._activations(alone, stage, offloads) for stage in self.stages(pipeline)]
        lists = lists_of(pipeline.schedule, pipeline.ranks, microbatches, pipeline.chunks)
        ranks = {*range(min(pipeline.ranks, FULLEST)), pipeline.ranks - 1}
        return {rank: peak_of_actions(lists[rank], held) for rank in ranks}

    def _activations(self, alone: Family, stage: Stage, offloads: bool) -> StageMemory:
        if offloads and len(stage.layers):
            stage = Stage(stage.layers[:1], stage.first, stage.last)
        slope = self._slope(alone._replace(tp=1, micro_batch=1), stage)
        return StageMemory(**{name: max(0, getattr(slope, name)) * alone.micro_batch // alone.tp for name in MEASURED})

    @cache  # noqa: B019
    def _slope(self, family: Family, stage: Stage) -> StageMemory:
        """Return how much memory each additional sample in a micro-batch takes."""
        first, second = (
            ActivationPlan(MicroBatch.of(self._probe(family._replace(micro_batch=samples))), self.cache).stage(stage)
            for samples in (1, 2)
        )
        return second - first

    @cache  # noqa: B019
    def _elements(self, stage: Stage) -> dict[bool, int]:
        metas = stage_metas(self.run.own.model, stage)
        sums = {expert: sum(meta.numel for meta in metas if meta.expert is expert) for expert in (False, True)}
        # a tied embedding is counted on the first stage, which may hold its only copy
        if stage.last and not stage.first and self.run.own.model.tied_embeddings:
            sums[False] -= sum(meta.numel for meta in metas if meta.role in ("embedding", "output"))
        return sums

    @cache  # noqa: B019
    def _bytes_each(self, saving: Saving, shards: int, expert: bool) -> float:
        """Return the bytes of state that one rank holds per element of a large matrix."""
        config = self.run.with_layout(Layout(saving=saving))
        found = [meta for meta in stage_metas(self.run.own.model) if meta.expert is expert and meta.matrix]
        if not found or any(config.optimizer.freezes(meta) for meta in found):
            return 0.0  # no lower bound is known for frozen parameters
        return _state_bytes(found[0], shards, config) / (shards * ELEMENTS)


MEASURED = ("kept", "for_weights", "forward", "backward", "weight", "weight_copies")


def _state_bytes(meta: ParamMeta, shards: int, config: RunConfig) -> int:
    """Return the bytes on one rank for the parameters, gradients and optimizer state of a matrix with `shards` x
    `ELEMENTS` elements."""
    optimizer = config.optimizer
    ddp = config.ddp
    parallel = config.parallel
    shape = (shards * ELEMENTS // ALIGNMENT, ALIGNMENT)
    unit_ranks = ddp.unit_ranks(parallel)
    buffers = plan_buffers([(meta, shape)], shards, shards, None, optimizer.group_of, (), False, unit_ranks)
    dtypes = parallel.params_dtype, parallel.main_dtype
    of_chain = 0
    if not optimizer.updates_together:
        dims = ParallelDims(dp=shards)
        of_chain = chain_bytes(buffers, optimizer, dims, 0, DTYPE_BYTES[parallel.main_dtype])[0][0]
    found = buffer_bytes(buffers, *dtypes, optimizer, ddp.drops_parameters(parallel), (of_chain, 0))
    if optimizer.whole_roles:  # only the rank that updates a matrix holds its states
        return found.parameters + found.gradients
    return found.total


def step_bound(
    stages: Sequence[Sequence[float]] | np.ndarray,
    layout: PipelineLayout,
    microbatches: int,
    more: Sequence[float] | None = None,
) -> float:
    """Return a lower bound, in seconds, on the step time under any schedule of these stages.

    A rank cannot start its first forward pass before the earlier stages have run their forward passes. After the last
    backward pass of the rank's first stage, the earlier stages still have to run their backward passes. All work of the
    rank lies between its first forward pass and its last backward pass, except for weight gradients, which may be
    deferred to the end.

    Args:
        stages: Seconds that a micro-batch takes in each stage, as (forward pass, backward pass, deferred weight
            gradient). If weight gradients are deferred, the time of the backward pass covers only the input gradient.
        layout: Placement of the stages.
        microbatches: Micro-batches per step.
        more: Seconds that each rank needs in addition to its passes, for example for communication.
    """
    longest, times = 0.0, np.asarray(stages)
    for rank in range(layout.pp):
        own = layout.stages_of(rank)
        start, after, _ = times[: own[0]].sum(0)
        forward, backward, weights = times[list(own)].sum(0)
        passes = microbatches * (forward + backward)
        beside = 0.0 if more is None else more[rank]
        longest = max(longest, start + passes + max(after, microbatches * weights) + beside)
    return float(longest)


def ideal_seconds_of_a_sample(one: Sequence[PassEvents], two: Sequence[PassEvents], device: DeviceFile) -> float:
    """Return the minimum time of a sample in seconds. This is the time that a second sample adds to a micro-batch,
    computed from the events of passes with one sample and with two samples.

    Work that is done once for all samples, such as reading weights, is excluded, because another layout may divide this
    work among more samples. Matrix products are assumed to keep every multiprocessor busy. Launch times, minimum kernel
    times and the times of collectives are ignored.
    """
    device = replace(device, kernel_floor_us=0.0, launch_gap_us=0.0, sustained=1.0, capability=None)  # no partial waves
    replay = Replay(device, Network(device, 1), {}, 0.0)
    alone, both = (
        sum(replay.kernel(event)[1] for part in parts for event in part.every if isinstance(event, Kernel))
        for parts in (one, two)
    )
    return max(0.0, both - alone)
