"""Time of a training step, predicted: what each rank's kernels and collectives take on a device, stage by stage, put
together by the pipeline's own schedule, and the work between two steps.

Every number comes from the fake step that gives memory and FLOPs, and from the device file. docs/planner.md says what
is modelled and how close predictions are to published runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from megatron.core.parallel_dims import ParallelDims
from megatron.core.parts import MICROBATCH_RUNNERS, linear_format, update_ahead
from megatron.core.pipeline_parallel.schedules import splits_backward
from megatron.core.pipeline_parallel.simulator import StageCosts
from megatron.core.pipeline_parallel.stages import Stage, pipeline_layout, pipeline_stages, tied_stages, whole_model
from megatron.extensions.planner.device_file import DeviceFile
from megatron.extensions.planner.dry_run.description import micro_batch_of
from megatron.extensions.planner.flops import model_flops
from megatron.extensions.planner.memory import RankStates, states_of_rank
from megatron.extensions.planner.time.data_parallel import DataParallel, Exposed
from megatron.extensions.planner.time.pipeline import Schedule, message_places
from megatron.extensions.planner.time.replay import Collective, Network, PassEvents, Placement, Replay, Times, placement
from megatron.extensions.planner.time.traces import TraceCache
from megatron.training.config.run_config import RunConfig

SUBJECTS = (
    "matmul",
    "attention",
    "element_wise",
    "tp_communication",
    "cp_communication",
    "ep_communication",
    "launch",
    "offload",
    "pipeline_bubble",
    "pipeline_messages",
    "grad_reduce",
    "param_gather",
    "optimizer",
    "overhead",
)
"""What a step's time is spent on. Communication is what is exposed of it, and by what it slows kernels beside it."""

AXES = ("tp", "cp", "ep", "expt_tp")


@dataclass(frozen=True)
class StepTime:
    """A predicted step. `parts` are the seconds of the busiest pipeline rank, by `SUBJECTS`; they sum to `seconds`."""

    seconds: float
    tokens_per_second: float
    """Of all ranks."""

    tflops: float
    """Causal model FLOPs per second of a device, in 1e12; recomputation is not counted."""

    mfu: float | None
    """Of the device's peak in the precision of the linear layers; None if the device file does not name that."""

    parts: dict[str, float]
    bubble: float
    """Share of the step that the mean pipeline rank idles or sends while passes run, until the last of them ends."""

    parts_of_pp_rank: int | None = None
    """The pipeline rank whose `parts` these are; None without pipeline parallelism."""

    @property
    def bound_by(self) -> str:
        """The subject that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)


@dataclass
class PlannerCache(TraceCache):
    """What predictions of many layouts share."""

    states: dict[Hashable, RankStates] = field(default_factory=dict)


def predict_step(
    config: RunConfig,
    world_size: int,
    device: DeviceFile,
    gpus_per_node: int | None = None,
    cache: PlannerCache | None = None,
) -> StepTime:
    """Predicts a step of a resolved and validated configuration on `world_size` devices.

    `gpus_per_node` is by default `device.ranks_of_node`. `cache` keeps traces between calls. Raises ValueError where
    the device file lacks a rate that the step needs.
    """
    step = _Step(config, world_size, device, gpus_per_node or device.ranks_of_node(world_size), cache or PlannerCache())
    return step.predict()


def part_times(
    config: RunConfig,
    world_size: int,
    device: DeviceFile,
    gpus_per_node: int | None = None,
    cache: PlannerCache | None = None,
) -> list[StageTimes]:
    """What `predict_step` adds up to stages: a micro-batch in the embedding, in each layer, and in the head. Layouts
    whose layers do the same have equal times, wherever their stages lie. Raises ValueError as `predict_step` does."""
    step = _Step(config, world_size, device, gpus_per_node or device.ranks_of_node(world_size), cache or PlannerCache())
    found: dict[int, Times] = {}
    (parts,) = step.cache.parts_of(step.batch, [whole_model(config.model)])
    return [step.stage([part], found) for part in parts]


@dataclass(frozen=True)
class StageTimes:
    """Of one micro-batch on one stage."""

    forward: Times
    backward: Times
    weight: Times
    once: Times
    exchanges: int = 0
    """All-to-alls of experts in the forward, and as many in the backward."""

    exchange: float = 0.0
    """Time of one of them."""

    @property
    def every(self) -> Times:
        return Times().add(self.forward).add(self.backward).add(self.weight)


class _Step:
    def __init__(
        self, config: RunConfig, world_size: int, device: DeviceFile, ranks_per_node: int, cache: PlannerCache
    ) -> None:
        self.config, self.device, self.cache = config, device, cache
        self.dims = ParallelDims.from_config(config.parallel, world_size)
        self.network = Network(device, min(ranks_per_node, world_size))
        groups = {axis: placement(self.dims, (axis,), self.network.ranks_per_node) for axis in AXES}
        groups["tp_cp"] = placement(self.dims, ("cp", "tp"), self.network.ranks_per_node)
        groups["expt_tp_ep"] = placement(self.dims, ("ep", "expt_tp"), self.network.ranks_per_node)
        runner = config.parallel.microbatch_runner
        at_once = runner is not None and MICROBATCH_RUNNERS.facts(runner).launches_once
        host_us = 0.0 if at_once else device.host_launch_us
        self.replay = Replay(device, self.network, groups, host_us)
        self.batch = replace(micro_batch_of(config), device=device.device_type)
        samples = config.training.global_batch_size or config.training.micro_batch_size * self.dims.dp
        self.tokens = samples * config.model.seq_length
        self.microbatches = max(1, samples // (config.training.micro_batch_size * self.dims.dp))

    def predict(self) -> StepTime:
        config = self.config
        self.layout = pipeline_layout(config.model, config.parallel)
        stages = pipeline_stages(config.model, config.parallel)
        found: dict[int, Times] = {}
        times = [self.stage(parts, found) for parts in self.cache.parts_of(self.batch, stages)]
        costs = self._costs(times)
        ranks = [self._rank(times, rank) for rank in range(self.layout.pp)]
        busy = [self.microbatches * each.total for each in ranks]
        ends, messages = busy, [0.0] * len(busy)
        if self.layout.num_stages > 1:
            parallel = config.parallel
            group = parallel.microbatch_group_size_per_virtual_pipeline_stage
            in_turns = parallel.pass_pair is not None
            ahead = update_ahead(config.optimizer) is not None and not tied_stages(config.model, self.layout)
            schedule = Schedule(parallel.schedule, self.layout, group, in_turns, ahead)
            pipeline = schedule.times(costs, self.microbatches)
            ends, messages = list(pipeline.ends), list(pipeline.messages)
        between = self._between_all(stages, times)
        reduced = [end + each.grad_reduce for end, each in zip(ends, between, strict=True)]
        # The rank that ends last may be one that idles for most of the step, and then tells nothing of what bounds it.
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
        rate = model_flops(config.model).total * self.tokens / seconds / self.dims.world_size / 1e12
        peak = self._peak_tflops()
        bubble = (max(ends) - sum(busy) / len(busy)) / seconds
        place = busiest if len(ranks) > 1 else None
        return StepTime(seconds, self.tokens / seconds, rate, rate / peak if peak else None, dict(parts), bubble, place)

    def _peak_tflops(self) -> float | None:
        """Of the linear layers' precision, if the device file has it. An fp8 step beside no peak of fp8 is one of 16
        bits, whose rate products have then."""
        peaks, parallel = self.device.peak_tflops, self.config.parallel
        name = linear_format(parallel)
        if name is not None and name in peaks:
            return peaks[name]
        wide = {"float32": "fp32", "float64": "fp64"}
        return peaks.get(wide.get(parallel.params_dtype, "bf16"))

    def stage(self, parts: Sequence[PassEvents], found: dict[int, Times]) -> StageTimes:
        """`found` keeps the times of lists of events that occur again."""

        def of(events: Sequence[object]) -> Times:
            if id(events) not in found:
                found[id(events)] = self.replay.run(events)  # type: ignore[arg-type]
            return found[id(events)]

        forward, backward, weight, once = Times(), Times(), Times(), Times()
        exchanges, exchange = 0, 0.0
        for part in parts:
            forward.add(of(part.forward))
            backward.add(of(part.backward))
            weight.add(of(part.weight))
            once.add(of(part.once))
            if part.offloaded:
                copy = part.offloaded / self.device.host_gb_per_second / 1e9
                forward.spend("offload", max(0.0, copy - of(part.forward).total))
                backward.spend("offload", max(0.0, copy - of(part.backward).total))
            swaps = [e for e in part.forward if isinstance(e, Collective) and e.kind == "all_to_all"]
            exchanges += len(swaps)
            exchange += sum(map(self.replay.collective, swaps))
        return StageTimes(forward, backward, weight, once, exchanges, exchange / max(1, exchanges))

    def _costs(self, times: Sequence[StageTimes]) -> StageCosts:
        parallel = self.config.parallel
        split = splits_backward(parallel.schedule)
        in_turns = parallel.pass_pair is not None

        def seconds(spent: Times) -> float:
            return spent.total - (spent.get("ep_communication", 0.0) if in_turns else 0.0)

        return StageCosts(
            forward=[seconds(stage.forward) for stage in times],
            input_grad=[seconds(stage.backward) for stage in times],
            weight_grad=[stage.weight.total if split else 0.0 for stage in times],
            comm=self._messages(),
            exchanges=[stage.exchanges if in_turns else 0 for stage in times],
            exchange=max(stage.exchange for stage in times) if in_turns else 0.0,
        )

    def _messages(self) -> list[float]:
        """By stage, the time of a message between it and the next one."""
        model, parallel = self.config.model, self.config.parallel
        if self.layout.num_stages == 1:
            return [0.0]
        rows = model.seq_length // self.dims.cp // (self.dims.tp if parallel.sequence_parallel else 1)
        size = rows * self.config.training.micro_batch_size * model.hidden_size
        size *= {"float32": 4, "float64": 8}.get(parallel.params_dtype, 2)
        ranks = [self.dims.rank(pp=place) for place in range(self.layout.pp)]
        crossing = message_places(self.layout, ranks, self.network.ranks_per_node)
        # Of the ranks of a node those send to another one whose pipeline continues there.
        within, between = Placement(2, 2), placement(self.dims, ("pp",), self.network.ranks_per_node)
        return [self.network.seconds("send", size, between if crosses else within) for crosses in crossing]

    def _rank(self, times: Sequence[StageTimes], rank: int) -> Times:
        """What a rank does for one micro-batch."""
        spent = Times()
        for stage in self.layout.stages_of(rank):
            spent.add(times[stage].every)
        return spent

    def _between_all(self, stages: Sequence[Stage], times: Sequence[StageTimes]) -> list[Exposed]:
        """By pipeline rank. Ranks that hold layers of the same kinds do the same, unless parameters are told apart by
        their names."""
        alike, found = self.cache.alike(self.batch), dict[Hashable, Exposed]()
        result = []
        for rank in range(self.layout.pp):
            own = [stages[stage] for stage in self.layout.stages_of(rank)]
            key: Hashable = rank
            if not (self.config.optimizer.has_own_groups or self.config.optimizer.freeze):
                key = tuple((s.first, s.last, tuple(alike[number] for number in s.layers)) for s in own)
            if key not in found:
                found[key] = self._between(rank, times)
            result.append(found[key])
        return result

    def _between(self, rank: int, times: Sequence[StageTimes]) -> Exposed:
        config, own = self.config, self.layout.stages_of(rank)
        key = config.model, config.parallel, config.optimizer, config.ddp, self.dims, rank
        if key not in self.cache.states:
            self.cache.states[key] = states_of_rank(*key)
        shared = DataParallel(config.parallel, config.ddp, config.optimizer, self.dims, self.network, self.device)
        forward = sum(times[stage].forward.total for stage in own)
        backward = sum(times[stage].backward.total + times[stage].weight.total for stage in own)
        return shared.exposed(self.cache.states[key], forward, backward, self.microbatches)

    def _overhead(self) -> float:
        """Fixed time, and the sums over all ranks of a number or two: loss, tokens and gradient norm."""
        world = Placement(self.dims.world_size, self.network.ranks_per_node)
        return 1e-3 * self.device.step_overhead_ms + 3 * self.network.seconds("all_reduce", 8, world)
