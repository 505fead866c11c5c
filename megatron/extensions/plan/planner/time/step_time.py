"""Predict the time of a training step from its kernels, collectives, pipeline schedule and work between steps.

All times are derived from the device file and from the fake step that also measures memory and FLOPs. docs/planner.md
describes the model and its error on published runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, prod
from typing import NamedTuple

from megatron.core.distributed.param_layout import default_bucket_size, unit_of
from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.core.pipeline_parallel.layout import Stage
from megatron.core.pipeline_parallel.stages import pipeline_layout, whole_model
from megatron.core.tensor_parallel.linear_formats import gathered_format, linear_format
from megatron.extensions.plan.planner.device_file import DeviceFile
from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.flops import model_flops
from megatron.extensions.plan.planner.memory import (
    DEVICE,
    DISK,
    DTYPE_BYTES,
    RankStates,
    local_shape,
    place_of_units,
    states_of_rank,
)
from megatron.extensions.plan.planner.micro_batch import MicroBatch
from megatron.extensions.plan.planner.time.events import Collective, Event, PassEvents
from megatron.extensions.plan.planner.time.pipeline import Schedule
from megatron.extensions.plan.planner.time.replay import Network, Placement, Replay, Times, nested_placements, placement
from megatron.extensions.plan.planner.time.weight_copies import copies_beside, streamed_elements
from megatron.extensions.plan.simulator.simulator import StageCosts
from megatron.training.config.run_config import RunConfig
from megatron.training.step_parts import launches_once, runs_passes_in_turns

SUBJECTS = (
    *("matmul", "attention", "element_wise", "tp_communication", "cp_communication", "ep_communication", "launch"),
    *("offload", "pipeline_bubble", "pipeline_messages", "grad_reduce", "param_gather", "optimizer", "overhead"),
)
"""Categories into which the time of a step is divided. The communication categories include exposed time and the time
by which communication slows concurrent kernels."""

AXES = ("tp", "cp", "ep", "expt_tp")


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step. `parts` maps each category in `SUBJECTS` to the seconds that it takes on the busiest
    pipeline rank. The sum of these times is `seconds`."""

    seconds: float
    tokens_per_second: float
    """Tokens per second, summed over all ranks."""

    tflops: float
    """Model TFLOP/s per device. For causal attention, half of the s x s scores are counted. Recomputation is not
    counted."""

    mfu: float | None
    """MFU relative to the device's peak in the precision of the linear layers; None if the device file does not state
    that peak."""

    parts: dict[str, float]
    bubble: float
    """Share of the step time in which a pipeline rank is idle or waits for messages before the last pass ends. The
    share is averaged over the ranks."""

    parts_of_pp_rank: int | None
    """Pipeline rank whose times `parts` holds; None without pipeline parallelism."""

    device: DeviceFile
    world_size: int
    gpus_per_node: int

    @property
    def bound_by(self) -> str:
        """Return the category that takes the most time in the step."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def record(self) -> dict[str, object]:
        """Return the step as a JSON object with seconds and shares."""
        found = {name: value for name, value in vars(self).items() if name != "world_size"}
        of_device = self.tokens_per_second / self.world_size
        own = {"device": self.device.name, "tokens_per_second_per_device": of_device, "bound_by": self.bound_by}
        return found | own


def predict_step(
    config: RunConfig,
    world_size: int,
    device: DeviceFile,
    gpus_per_node: int | None = None,
    cache: PlannerCache | None = None,
) -> StepTime:
    """Predict a step of a resolved and validated configuration.

    Args:
        config: The configuration.
        world_size: Number of devices.
        device: Device file.
        gpus_per_node: Ranks per node; the default is `device.ranks_of_node`.
        cache: Cache for recordings of stage parts, shared by several calls.

    Raises:
        ValueError: The device file lacks a rate that the step needs.
    """
    return Step(
        config, world_size, device, gpus_per_node or device.ranks_of_node(world_size), cache or PlannerCache()
    ).predict()


@dataclass(frozen=True)
class StageTimes:
    """Times of one micro-batch in one stage."""

    forward: Times
    backward: Times
    weight: Times
    once: Times
    exchanges: int = 0
    """Number of expert all-to-alls in the forward pass. The backward pass has the same number."""

    exchange: float = 0.0
    """Time of one expert all-to-all in seconds."""

    @property
    def every(self) -> Times:
        return Times().add(self.forward).add(self.backward).add(self.weight)


class Exposed(NamedTuple):
    """Exposed communication of a step on one rank, in seconds."""

    grad_reduce: float
    param_gather: float
    optimizer: float


class Step:
    """Predictor of the time of a training step, for one configuration on one kind of device."""

    def __init__(
        self, config: RunConfig, world_size: int, device: DeviceFile, gpus_per_node: int, cache: PlannerCache
    ) -> None:
        self.config = config
        self.device = device
        self.gpus_per_node = gpus_per_node
        self.cache = cache
        self.dims = ParallelDims.from_config(config.parallel, world_size)
        self.network = Network(device, min(gpus_per_node, world_size))
        groups = {axis: placement(self.dims, (axis,), self.network.ranks_per_node) for axis in AXES}
        groups["tp_cp"] = placement(self.dims, ("cp", "tp"), self.network.ranks_per_node)
        groups["expt_tp_ep"] = placement(self.dims, ("ep", "expt_tp"), self.network.ranks_per_node)
        if self.dims.cp_inner is not None:
            groups["cp_inner"], groups["cp_outer"] = nested_placements(groups["cp"], self.dims.cp_inner)
        host_us = 0.0 if launches_once(config) else device.host_launch_us
        self.replay, self._known_times = Replay(device, self.network, groups, host_us), dict[int, Times]()
        self.batch = replace(MicroBatch.of(config), device=device.device_type)
        samples = config.training.global_batch_size or config.training.micro_batch_size * self.dims.dp
        self.tokens = samples * config.model.seq_length
        self.microbatches = max(1, samples // (config.training.micro_batch_size * self.dims.dp))

    def part_times(self) -> list[StageTimes]:
        """Return the times of a micro-batch in three kinds of parts: the embedding, each layer, and the output layer.

        `predict` sums these times to obtain the time of a stage. The times are equal for all layouts whose layers do
        the same work, regardless of stage boundaries.
        """
        (parts,) = self.cache.parts_of(self.batch, [whole_model(self.config.model)])
        return [self._stage([part]) for part in parts]

    def predict(self) -> StepTime:
        """Predict the step. Raises ValueError if the device file lacks a rate that the step needs."""
        config = self.config
        self.layout = pipeline_layout(config.model, config.parallel)
        stages = pipeline_stages(config.model, config.parallel)
        parts_of_stages = self.cache.parts_of(self.batch, stages)
        times = [self._stage(parts) for parts in parts_of_stages]
        if place_of_units(config.parallel) != DEVICE:
            for each in zip(times, parts_of_stages, stages, strict=True):
                self._add_weight_copies(*each)
        costs = self._costs(times)
        ranks = [Times() for _ in range(self.layout.pp)]
        for stage, of_stage in enumerate(times):
            ranks[self.layout.rank_of(stage)].add(of_stage.every)
        busy = [self.microbatches * each.total for each in ranks]
        ends, messages = tuple(busy), (0.0,) * len(busy)
        if self.layout.num_stages > 1:
            ends, messages = Schedule.of_run(config).times(costs, self.microbatches)
        between = [self._between(rank, times) for rank in range(self.layout.pp)]
        reduced = [end + each.grad_reduce for end, each in zip(ends, between, strict=True)]
        # The rank that ends last may be idle for most of the step, so its time would not show the bottleneck.
        busiest = max(range(len(ranks)), key=busy.__getitem__)
        parts = Times(dict.fromkeys(SUBJECTS, 0.0))
        parts.add(ranks[busiest], self.microbatches)
        idle = max(reduced) - between[busiest].grad_reduce - busy[busiest]
        parts.spend("pipeline_messages", min(messages[busiest], max(0.0, idle)))
        parts.spend("pipeline_bubble", idle - parts["pipeline_messages"])
        parts.spend("grad_reduce", between[busiest].grad_reduce)
        parts.spend("param_gather", max(each.param_gather for each in between))
        parts.spend("optimizer", max(each.optimizer for each in between))
        once = [sum(times[stage].once.total for stage in self.layout.stages_of(rank)) for rank in range(len(ranks))]
        parts.spend("element_wise", max(once))
        parts.spend("overhead", self._overhead())
        seconds = parts.total
        per_token = model_flops(config.model, kinds=self.cache.kinds_of(config.model)).total
        rate = per_token * self.tokens / seconds / self.dims.world_size / 1e12
        peak = self._peak_tflops()
        bubble = (max(ends) - sum(busy) / len(busy)) / seconds
        return StepTime(
            seconds,
            self.tokens / seconds,
            rate,
            rate / peak if peak else None,
            dict(parts),
            bubble,
            busiest if len(ranks) > 1 else None,
            self.device,
            self.dims.world_size,
            self.gpus_per_node,
        )

    def _peak_tflops(self) -> float | None:
        """Return the device's peak in the precision of the linear layers; None if the device file does not state it.

        If the device file has no fp8 peak, the MFU of an fp8 step is relative to the 16-bit peak.
        """
        peaks, parallel = self.device.peak_tflops, self.config.parallel
        name = linear_format(parallel)
        if name is not None and name in peaks:
            return peaks[name]
        wide = {"float32": "fp32", "float64": "fp64"}
        return peaks.get(wide.get(parallel.params_dtype, "bf16"))

    def _times(self, events: Sequence[Event]) -> Times:
        """Return the times of a list of events. The times of a list are computed only once. Identical layers share one
        list of events."""
        if id(events) not in self._known_times:
            self._known_times[id(events)] = self.replay.run(events)
        return self._known_times[id(events)]

    def _stage(self, parts: Sequence[PassEvents]) -> StageTimes:
        forward = Times()
        backward = Times()
        weight = Times()
        once = Times()
        exchanges, exchange = 0, 0.0
        for part in parts:
            forward.add(self._times(part.forward))
            backward.add(self._times(part.backward))
            weight.add(self._times(part.weight))
            once.add(self._times(part.once))
            if part.memory.offloaded:
                copy = part.memory.offloaded / self.device.host_gb_per_second / 1e9
                forward.spend("offload", max(0.0, copy - self._times(part.forward).total))
                backward.spend("offload", max(0.0, copy - self._times(part.backward).total))
            swaps = [e for e in part.forward if isinstance(e, Collective) and e.kind == "all_to_all"]
            exchanges += len(swaps)
            exchange += sum(map(self.replay.collective, swaps))
        return StageTimes(forward, backward, weight, once, exchanges, exchange / max(1, exchanges))

    def _add_weight_copies(self, times: StageTimes, parts: Sequence[PassEvents], stage: Stage) -> None:
        """Add the exposed time of copying weights and gradients between device and host during the passes of a
        micro-batch."""
        seconds = [
            (self._times(part.forward).total, self._times(part.backward).total + self._times(part.weight).total)
            for part in parts
        ]
        elements, rate = streamed_elements(self.config, self.dims, stage), self.device.host_gb_per_second
        if place_of_units(self.config.parallel) == DISK:
            rate = min(rate, self.device.disk_gb_per_second)
        forward, backward = copies_beside(self.config, elements, seconds, self.microbatches > 1, rate)
        times.forward.spend("offload", forward)
        times.backward.spend("offload", backward)

    def _costs(self, times: Sequence[StageTimes]) -> StageCosts:
        in_turns = runs_passes_in_turns(self.config)

        def seconds(spent: Times) -> float:
            return spent.total - (spent.get("ep_communication", 0.0) if in_turns else 0.0)

        return StageCosts(
            forward=[seconds(stage.forward) for stage in times],
            input_grad=[seconds(stage.backward) for stage in times],
            weight_grad=[stage.weight.total for stage in times],
            comm=self._messages(),
            exchanges=[stage.exchanges if in_turns else 0 for stage in times],
            exchange=max(stage.exchange for stage in times) if in_turns else 0.0,
        )

    def _messages(self) -> list[float]:
        """Return the time of a message from each stage to the next stage."""
        model, parallel = self.config.model, self.config.parallel
        if self.layout.num_stages == 1:
            return [0.0]
        rows = model.seq_length // self.dims.cp // (self.dims.tp if parallel.sequence_parallel else 1)
        size = rows * self.config.training.micro_batch_size * model.residual_size
        size *= DTYPE_BYTES[parallel.params_dtype]
        nodes = [self.dims.rank(pp=place) // self.network.ranks_per_node for place in range(self.layout.pp)]
        places = [nodes[self.layout.rank_of(stage)] for stage in range(self.layout.num_stages)]
        # A rank whose next pipeline stage is on another node sends over the network.
        within, between = Placement(2, 2), placement(self.dims, ("pp",), self.network.ranks_per_node)
        return [
            self.network.seconds("send", size, within if here == there else between)
            for here, there in pairwise([*places, places[-1]])
        ]

    def _between(self, rank: int, times: Sequence[StageTimes]) -> Exposed:
        config, own = self.config, self.layout.stages_of(rank)
        states = states_of_rank(config, self.dims, rank)
        forward = sum(times[stage].forward.total for stage in own)
        backward = sum(times[stage].backward.total + times[stage].weight.total for stage in own)
        numels = {False: 0, True: 0}
        for meta in states.metas:
            if not config.optimizer.freezes(meta):
                numels[meta.expert] += prod(local_shape(meta, self.dims))
        every_batch = config.ddp.shards_gradients
        units = len({unit_of(meta.name) for meta in states.metas})
        reduce = [time for expert, numel in numels.items() for time in self._reductions(numel, expert, units)]
        gather = [time for expert, numel in numels.items() for time in self._gathers(numel, expert, units)]
        overlaps = config.ddp.overlap_grad_reduce or every_batch
        reduced = self._behind(reduce, backward) if overlaps else sum(reduce)
        reduced *= self.microbatches if every_batch else 1
        if config.ddp.shards_parameters:  # parameters are gathered for both passes of every micro-batch
            gathered = self.microbatches * (self._behind(gather, forward) + self._behind(gather, backward))
        elif config.optimizer.use_distributed_optimizer:
            gathered = self._behind(gather, forward) if config.ddp.overlap_param_gather else sum(gather)
        else:
            gathered = 0.0
        return Exposed(reduced, gathered, self._update(states))

    def least_exchanged(
        self, elements: Mapping[bool, float], forward: float, backward: float, microbatches: int
    ) -> float:
        """Return a lower bound on the exposed time, in seconds per step, of a rank's gradient reductions and parameter
        gathers.

        If collectives take T seconds and the computation that can hide them takes C seconds, at least T - C seconds are
        exposed. The hidden part of the collectives slows the computation.

        Args:
            elements: Numbers of trained parameters; the key is True for experts and False for dense parameters.
            forward: Lower bound on the seconds of a micro-batch's forward pass.
            backward: Lower bound on the seconds of a micro-batch's backward pass.
            microbatches: Micro-batches per step.
        """
        slowdown = min(1.0, self.device.overlap_slowdown)
        reduce = sum(time for expert, count in elements.items() for time in self._reductions(count, expert, 1))
        gather = sum(time for expert, count in elements.items() for time in self._gathers(count, expert, 1))

        def added(time: float, compute: float) -> float:
            return (1 - slowdown) * max(0.0, time - compute) + slowdown * time

        if self.config.ddp.shards_parameters:  # a longer backward pass hides more of both reductions and gathers
            longer = max(0.0, min(reduce, gather) - backward)
            both = added(reduce, backward + longer) + added(gather, backward + longer)
            return microbatches * (longer + both + added(gather, forward))
        reductions = microbatches if self.config.ddp.shards_gradients else 1
        return reductions * added(reduce, backward) + added(gather, forward)

    def _overhead(self) -> float:
        """Return the fixed time of a step plus the time of summing the loss, the token count and the gradient norm over
        all ranks."""
        world = Placement(self.dims.world_size, self.network.ranks_per_node)
        fixed = self.device.fixed_ms(self.dims.world_size)
        return 1e-3 * fixed + 3 * self.network.seconds("all_reduce", 8, world)

    def _behind(self, times: Sequence[float], compute: float) -> float:
        """Return the exposed time of a sequence of collectives that overlaps with computation. The operands of the
        collectives become ready at equal intervals during the computation.

        The hidden part of the collectives slows the computation.
        """
        clock = 0.0
        for number, time in enumerate(times, 1):
            clock = max(clock, compute * number / len(times)) + time
        exposed = max(0.0, clock - compute) if times else 0.0
        return exposed + self.device.overlap_slowdown * max(0.0, sum(times) - exposed)

    def _reductions(self, numel: float, expert: bool, units: int) -> list[float]:
        """Return the communication times of the gradient buckets. If gradients are sharded, there is at least one
        bucket for each unit, such as a layer."""
        main = 2 if self.config.ddp.grad_reduce_in_bf16 or self.config.optimizer.gradients_dtype == "bfloat16" else None
        size = main or DTYPE_BYTES[self.config.parallel.main_dtype]
        kind = "reduce_scatter" if self.config.optimizer.use_distributed_optimizer else "all_reduce"
        return self._buckets(numel, size, expert, kind, units if self.config.ddp.shards_gradients else 1)

    def _gathers(self, numel: float, expert: bool, units: int) -> list[float]:
        size = DTYPE_BYTES[self.config.parallel.params_dtype] if gathered_format(self.config.parallel) is None else 1
        return self._buckets(numel, size, expert, "all_gather", units if self.config.ddp.shards_parameters else 1)

    def _buckets(self, numel: float, size: int, expert: bool, kind: str, least: int) -> list[float]:
        if not numel:
            return []
        within, across = self._groups(expert)
        if within.size * across.size == 1:
            return []
        limit = self.config.ddp.ddp_bucket_size or default_bucket_size(within.size)
        count = max(least, ceil(numel / limit))
        moved = numel * size / count
        time = self.network.seconds(kind, moved, within)
        if across.size > 1 and kind != "all_gather":
            share = moved / within.size if kind == "reduce_scatter" else moved
            time += self.network.seconds("all_reduce", share, across)
        return [time] * count

    def _groups(self, expert: bool) -> tuple[Placement, Placement]:
        """Return two placements. The first one describes the ranks over which a distributed-optimizer instance shards
        states. The second one describes the ranks that hold the same shard in different instances."""
        axes = ("expt_dp",) if expert else ("dp", "cp")
        whole = placement(self.dims, axes, self.network.ranks_per_node)
        if self.dims.instances == 1:
            return whole, Placement(1, 1)
        size = whole.size // self.dims.instances
        return Placement(size, min(size, whole.in_node), whole.stride), Placement(
            self.dims.instances, max(1, whole.in_node // size), whole.stride * size
        )

    def _update(self, states: RankStates) -> float:
        """Return the time of an optimizer update. The update clears the gradients, reads them for the gradient norm and
        for the update itself, and updates states and parameters."""
        memory, device = states.memory, self.device
        shards = self.dims.shards(False) if self.config.optimizer.use_distributed_optimizer else 1
        moved = memory.gradients + 2 * memory.gradients / shards + memory.parameters / shards
        moved += 2 * (memory.main_parameters + memory.moments + memory.rollback)
        # On the host, gradient sums are read for their norm, scaled in place, and read for the update.
        here = 2 * memory.host_states + memory.host_parameters + 4 * memory.host_gradients
        seconds = moved / device.copy_tb_per_second / 1e12 + 2 * memory.host_slots / device.host_gb_per_second / 1e9
        rate = device.host_update_gb_per_second or device.host_gb_per_second
        if place_of_units(self.config.parallel) == DISK:
            rate = min(rate, device.disk_gb_per_second)
        return seconds + here / rate / 1e9
