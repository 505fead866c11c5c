"""Plan the memory of each pipeline rank: parameters, gradients and optimizer state (computed from parameter shapes),
and activations.

torch is imported only to measure activations. Buffers are planned by the function that also lays them out in a run, so
the planned bytes equal the allocated bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import UNIT_STORES, DDPConfig, ModelParallelConfig
from megatron.core.distributed.param_layout import (
    BucketLayout,
    BufferLayout,
    place_states,
    plan_buffers,
    unit_of,
)
from megatron.core.parallel_dims import ParallelDims
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.core.pipeline_parallel.layout import Stage
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages
from megatron.core.tensor_parallel.linear_formats import gathered_format
from megatron.training.config.batch_size import microbatches_of
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS
from megatron.training.step_parts import STEP_PARTS, UpdateBytes, late_update

if TYPE_CHECKING:
    from megatron.extensions.plan.planner.activations import RankActivations
    from megatron.extensions.plan.planner.fake_stage import PlannerCache

EMBEDDING = "embedding.word_embeddings"

DEVICE = "device"
HOST = "host"
DISK = "disk"
"""Places (device, host and disk) that can store units, such as layers, between passes."""

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class BufferBytes:
    """Bytes of one rank's parameters, gradients and optimizer state, including padding. All attributes count bytes on
    the device, except `disk` and the attributes whose names begin with `host`."""

    parameters: int
    gradients: int
    main_parameters: int
    """Bytes of the main parameters; 0 if the parameters themselves have the main dtype and need no copy."""

    moments: int

    host_states: int = 0
    """Bytes of main parameters and moments in host memory."""

    host_slots: int = 0
    """Bytes of the host buffers through which gradients and parameters are copied."""

    host_parameters: int = 0
    """Bytes of parameters that are stored in host memory between passes."""

    host_gradients: int = 0

    disk: int = 0
    """Bytes of parameters and optimizer states that are stored in files."""

    rollback: int = 0
    """Bytes of the copies that are kept to roll back an update made before the gradient norm is known."""

    @property
    def optimizer(self) -> int:
        """Bytes of optimizer states on the device."""
        return self.main_parameters + self.moments + self.rollback

    @property
    def total(self) -> int:
        """Total bytes on the device."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> int:
        """Bytes in host memory, excluding data in files."""
        return self.host_states + self.host_slots + self.host_parameters + self.host_gradients - self.disk


def buffer_bytes(
    buffers: Sequence[BufferLayout],
    params_dtype: str,
    main_dtype: str,
    optimizer: OptimizerConfig,
    drops_parameters: bool = False,
    of_chain: tuple[int, int] = (0, 0),
    units: str = DEVICE,
) -> BufferBytes:
    """Return the memory of buffers and optimizer state on one rank.

    The result is exact, except that it omits one scalar step count for each range of states. Units that are temporarily
    unsharded are not included; see `UnitsInFlight`. `of_chain` contains two sizes in bytes, one on the device and one
    on the host. Each size covers all callback states, and the transform-chain states that are stored outside shards.
    `units` is the place (DEVICE, HOST or DISK) that stores units, such as layers, between passes.
    """
    from megatron.core.optimizer.fused import states_of_shards  # imports torch

    main, params = DTYPE_BYTES[main_dtype], DTYPE_BYTES[params_dtype]
    plan = optimizer.state_plan
    gradient = DTYPE_BYTES[optimizer.gradients_dtype or main_dtype]
    ranges, states = place_states(buffers, optimizer), [states_of_shards(optimizer, buffer) for buffer in buffers]
    mains, moments = {False: 0, True: 0}, {False: 0, True: 0}
    disk = 0
    for place in ranges:
        kind = plan.main_kind(optimizer, params_dtype, main_dtype, place.on_host)
        of_main = plan.main_bytes(place.numel, kind, main)
        others = sum(state.nbytes(place.numel, main) for state in states[place.buffer])
        mains[place.on_host] += of_main
        moments[place.on_host] += others
        disk += of_main + others if units == DISK and place.on_host and buffers[place.buffer].by_unit else 0
    for on_host, size in enumerate(of_chain):
        moments[bool(on_host)] += size
    of_units = [buffer for buffer in buffers if buffer.by_unit and units != DEVICE]
    here = [buffer for buffer in buffers if buffer not in of_units]
    sent = [place.numel for place in ranges if place.on_host and buffers[place.buffer] in here]
    slots, size = optimizer.host_slots(sent)
    rollback = 0
    kept_of_units = sum(buffer.kept(True) for buffer in of_units)
    parameters = sum(buffer.kept(drops_parameters) for buffer in here) * params
    if (late := late_update(optimizer)) is not None:
        aliased = plan.main_kind(optimizer, params_dtype, main_dtype) == "aliased"
        owned = sum(place.numel for place in ranges)
        main_bytes = mains[False] + moments[False] + owned * (params if aliased else 0)
        kept = STEP_PARTS.facts(late).kept
        assert kept is not None
        rollback = kept(UpdateBytes(parameters, owned * gradient, main_bytes))
    return BufferBytes(
        parameters=parameters,
        gradients=sum(buffer.kept(True) for buffer in here) * gradient,
        main_parameters=mains[False],
        moments=moments[False],
        host_states=mains[True] + moments[True],
        host_slots=slots * size * (gradient + params),
        host_parameters=kept_of_units * params,
        host_gradients=kept_of_units * gradient,
        disk=disk + kept_of_units * (params + gradient) if units == DISK else 0,
        rollback=rollback,
    )


@dataclass(frozen=True)
class UnitsInFlight:
    """Peak bytes of units, such as layers, that are temporarily unsharded: parameters under ZeRO-3, and gradients under
    ZeRO-2 and ZeRO-3.

    If units are stored in host memory, both their parameters and their gradients are counted.
    """

    parameters: int = 0
    gradients: int = 0

    reductions: int = 0
    """Additional bytes that a reduction takes: the rank's reduced shard, and a copy of the gradients in the
    communication dtype."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.reductions


@dataclass(frozen=True)
class RankStates:
    """Parameters and optimizer states of each rank at one pipeline position.

    All ranks with the same pipeline rank hold the same number of bytes, except for the states of an optimizer's
    transform chain. The states of the transform chain are counted for the rank on which they take the most bytes.
    """

    pp_rank: int
    stages: tuple[Stage, ...]
    metas: tuple[ParamMeta, ...]
    parameters: int
    """Number of elements in the rank's own shards, excluding padding."""

    memory: BufferBytes

    in_flight: UnitsInFlight

    of_callbacks: Mapping[str, int] = field(default_factory=dict)
    """Bytes of callback states, by callback name. The attribute `memory` counts these states as moments or, on the
    host, as host states."""


def states_of_rank(config: RunConfig, dims: ParallelDims, pp_rank: int) -> RankStates:
    """Return the parameters and optimizer states that each rank at `pp_rank` holds."""
    model = config.model
    parallel = config.parallel
    optimizer = config.optimizer
    ddp = config.ddp
    layout, stages = pipeline_layout(model, parallel), pipeline_stages(model, parallel)
    mine = [stages[s] for s in layout.stages_of(pp_rank)]
    metas = _metas_of(model, parallel, mine, tied_stages(model, layout))
    shapes = [(meta, local_shape(meta, dims)) for meta in metas]
    buffers = planned_buffers(config, dims, metas)
    dtypes = parallel.params_dtype, parallel.main_dtype
    device, host = chain_bytes(buffers, optimizer, dims, pp_rank, DTYPE_BYTES[parallel.main_dtype])
    of_callbacks = callback_bytes(config, buffers)
    on_host = sum(size for name, size in of_callbacks.items() if CALLBACKS.facts(name).stored(config).on_host)
    of_chain = max(device) + sum(of_callbacks.values()) - on_host, max(host) + on_host
    drops = ddp.drops_parameters(parallel)
    memory = buffer_bytes(buffers, *dtypes, optimizer, drops, of_chain, place_of_units(parallel))
    frozen = sum(prod(shape) for meta, shape in shapes if optimizer.freezes(meta))
    memory = replace(memory, parameters=memory.parameters + frozen * DTYPE_BYTES[parallel.params_dtype])
    elements = sum(prod(shape) for _, shape in shapes)
    in_flight = _units_in_flight(buffers, config, mine, microbatches_of(config, dims) > 1)
    return RankStates(pp_rank, tuple(mine), metas, elements, memory, in_flight, of_callbacks)


def planned_buffers(config: RunConfig, dims: ParallelDims, metas: Sequence[ParamMeta]) -> tuple[BufferLayout, ...]:
    """Return the layouts of the buffers that hold a rank's trained parameters."""
    optimizer, ddp = config.optimizer, config.ddp
    trained = [(meta, local_shape(meta, dims)) for meta in metas if not optimizer.freezes(meta)]
    sizes = dims.shards(False), dims.shards(True), ddp.ddp_bucket_size
    apart, unit_ranks = gathered_format(config.parallel) is not None, ddp.unit_ranks(config.parallel)
    return plan_buffers(trained, *sizes, optimizer.group_of, optimizer.whole_roles, apart, unit_ranks)


def place_of_units(parallel: ModelParallelConfig) -> str:
    """Return the place (DEVICE, HOST or DISK) that stores the parameters and gradients of units, such as layers,
    between passes."""
    if parallel.unit_store is None or not (facts := UNIT_STORES.facts(parallel.unit_store)).on_host:
        return DEVICE
    return DISK if facts.on_disk(parallel) else HOST


def callback_bytes(config: RunConfig, buffers: Sequence[BufferLayout]) -> dict[str, int]:
    """Return the bytes that each callback's states take on a rank, keyed by callback. The states may be on the device
    or on the host."""
    counts = {name: len(states) for name, states in states_of_callbacks(config).items()}
    owned = sum(place.numel for place in place_states(buffers, config.optimizer)) if counts else 0
    return {name: count * owned * DTYPE_BYTES[dtype_of_states(config, name)] for name, count in counts.items()}


def dtype_of_states(config: RunConfig, callback: str) -> str:
    """Return the name of the dtype in which a callback keeps its states."""
    return CALLBACKS.facts(callback).stored(config).dtype or config.parallel.main_dtype


def states_of_callbacks(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return the names of the states that each callback keeps; callbacks without states are omitted."""
    every = {name: CALLBACKS.facts(name).states_in(config) for name in CALLBACKS.wanted(config)}
    return {name: states for name, states in every.items() if states}


def chain_bytes(
    buffers: Sequence[BufferLayout], optimizer: OptimizerConfig, dims: ParallelDims, pp_rank: int, main: int
) -> tuple[list[int], list[int]]:
    """Return the bytes of those transform chain states that an optimizer stores outside the distributed optimizer's
    shards. The result consists of two lists: bytes on the device, and bytes on the host. Each list has an entry for
    each rank at `pp_rank`, in rank order.

    `main` is the number of bytes per element of main parameters.
    """
    from megatron.core.optimizer.transforms import plan_of_chain, states_of_parameter  # imports torch

    if not any(states_of_parameter(optimizer, param.meta) for buffer in buffers for param in buffer.params):
        return [0], [0]
    ranks = next(group for group in dims.groups("dp", "cp", "tp") if dims.coords(group[0])["pp"] == pp_rank)
    plan = plan_of_chain(optimizer, buffers, dims, ranks)
    return plan.bytes_by_place(main), plan.bytes_by_place(main, on_host=True)


def _units_in_flight(
    buffers: Sequence[BufferLayout], config: RunConfig, stages: Sequence[Stage], several: bool
) -> UnitsInFlight:
    """Return the peak bytes of units, such as layers, that are temporarily unsharded.

    Usually, the parameters of two units are unsharded at a time: the current unit and the next unit. Gradients are
    unsharded for the current unit and for the bucket that is being reduced. If units are stored in host memory, the
    device also holds gradient sums of a third unit from the second micro-batch on. These sums are copied to the device
    before the backward pass of the unit. The result is exact for one stage per rank without multi-token prediction;
    otherwise it may be off by one unit.
    """
    buckets = _buckets_of_units(buffers)
    if not buckets:
        return UnitsInFlight()
    forward, backward, held = _passes_of_units(list(buckets), config, stages)
    parallel, ddp = config.parallel, config.ddp
    main = DTYPE_BYTES[parallel.main_dtype]
    wholes = {unit: sum(bucket.stop - bucket.start for bucket in own) for unit, own in buckets.items()}

    gathered = [wholes[unit] for unit in forward]
    gathered += [wholes[unit] + wholes[after] for unit, after in pairwise(forward) if unit != after]
    if parallel.pipeline_model_parallel_size > 1 and len(forward) > 1:  # the next pass may be a forward pass too
        gathered.append(wholes[forward[-1]] + wholes[forward[0]])

    alone = [(wholes[unit] * main, 0) for unit in backward]
    reduced = []
    for computed, before in pairwise(backward):
        last = buckets[before][-1]
        size = last.stop - last.start
        reduced.append(((wholes[computed] + size) * main, _reduction_bytes(size, last.num_shards, parallel, ddp)))
    if place_of_units(parallel) != DEVICE and several:
        for after, computed, before in zip(backward, backward[1:], backward[2:], strict=False):
            first, last = buckets[after][0], buckets[before][-1]
            size = last.stop - last.start + (first.stop - first.start if first.num_shards == 1 else 0)
            added = _reduction_bytes(last.stop - last.start, last.num_shards, parallel, ddp)
            reduced.append(((wholes[computed] + size) * main, added))
    gradients = max(whole for whole, _ in [*reduced, *alone])
    with_reductions = max(whole + beside for whole, beside in [*reduced, *alone])

    return UnitsInFlight(
        parameters=max(gathered) * DTYPE_BYTES[parallel.params_dtype] if ddp.drops_parameters(parallel) else 0,
        gradients=(wholes[EMBEDDING] * main if held else 0) + gradients,
        reductions=with_reductions - gradients,
    )


def _buckets_of_units(buffers: Sequence[BufferLayout]) -> dict[str, list[BucketLayout]]:
    """Map each unit, such as a layer, to its gradient buckets, in forward order."""
    found: dict[str, list[BucketLayout]] = {}
    buckets = [bucket for buffer in buffers if buffer.by_unit for bucket in buffer.buckets]
    for bucket in sorted(buckets, key=lambda bucket: min(place.index for place in bucket.params)):
        found.setdefault(unit_of(bucket.params[0].meta.name), []).append(bucket)
    return found


def _passes_of_units(units: list[str], config: RunConfig, stages: Sequence[Stage]) -> tuple[list[str], list[str], bool]:
    """Return three values: the units of a forward pass, the units whose gradients a backward pass completes, and
    whether the gradient of the embedding stays unsharded during the whole backward pass."""
    if not (config.model.tied_embeddings and stages[-1].last and EMBEDDING in units):
        return units, units, False
    inner = [unit for unit in units if unit != EMBEDDING]
    if stages[0].first:
        return [*units, EMBEDDING], inner, True
    forward = [*inner, EMBEDDING]  # the output layer uses the unit of the embedding
    return forward, forward, False


def _reduction_bytes(size: int, num_shards: int, parallel: ModelParallelConfig, ddp: DDPConfig) -> int:
    """Return the additional bytes that the reduction of `size` elements needs. Buffers that the gloo backend needs are
    not counted, because GPU runs do not reduce gradients with gloo."""
    dtype = parallel.params_dtype if ddp.grad_reduce_in_bf16 else parallel.main_dtype
    if num_shards == 1:
        return 0  # gradients of a single rank are copied unchanged
    rounded = size if dtype != parallel.main_dtype else 0
    return (rounded + size // num_shards) * DTYPE_BYTES[dtype]


def _metas_of(
    model: TransformerConfig, parallel: ModelParallelConfig, stages: Sequence[Stage], tied: tuple[int, ...]
) -> tuple[ParamMeta, ...]:
    """Return the metadata of all parameters in a rank's stages. A tied embedding that two stages share is counted
    once."""
    found: dict[str, ParamMeta] = {}
    for stage in stages:
        metas = stage_metas(model, stage, sequence_parallel=parallel.sequence_parallel, tied_stages=tied)
        for meta in metas:
            found.setdefault(meta.name, meta)
    return tuple(found.values())


def local_shape(meta: ParamMeta, dims: ParallelDims) -> tuple[int, ...]:
    """Return the shape of a parameter's local shard; all shards have the same shape."""
    return meta.box({axis: (0, dims.size(axis)) for axis in meta.sharded})[1]


GIB = 2**30


@dataclass(frozen=True)
class RankMemory:
    """Planned memory of a rank at one pipeline position."""

    plan: RankStates
    activations: RankActivations
    working: int
    """Bytes of temporary allocations."""

    @property
    def sizes(self) -> dict[str, int]:
        """Return the bytes of each item on the device, keyed by the title of the item."""
        memory = self.plan.memory
        return {
            "weights": memory.parameters,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": self.activations.peak,
            "working": self.working,
        }

    @property
    def host(self) -> int:
        return self.plan.memory.host + self.activations.host

    @property
    def total(self) -> int:
        """Total bytes on the device."""
        return sum(self.sizes.values())

    @property
    def record(self) -> dict[str, int]:
        """Return the memory as a JSON object."""
        return {"pp_rank": self.plan.pp_rank, **self.sizes, "total": self.total, "host": self.host}


def fullest(memory: Sequence[RankMemory]) -> RankMemory:
    """Return the pipeline rank with the most memory."""
    return max(memory, key=lambda rank: rank.total)


def gib(size: float) -> str:
    """Format bytes in GiB with one decimal, or with three digits if the size is small."""
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.3g}"


def memory_of_ranks(config: RunConfig, world_size: int, cache: PlannerCache | None = None) -> list[RankMemory]:
    """Return the planned memory of each pipeline rank. `cache` keeps layer measurements between calls."""
    from megatron.extensions.plan.planner.activations import activations_of_ranks
    from megatron.extensions.plan.planner.micro_batch import MicroBatch

    dims = ParallelDims.from_config(config.parallel, world_size)
    plans = [states_of_rank(config, dims, rank) for rank in range(dims.pp)]
    activations = activations_of_ranks(MicroBatch.of(config), microbatches_of(config, dims), cache)
    pairs = zip(plans, activations, strict=True)
    return [RankMemory(plan, held, come_and_go(plan, held, config)) for plan, held in pairs]


def come_and_go(plan: RankStates, held: RankActivations, config: RunConfig) -> int:
    """Return the total bytes of temporary tensors, temporarily unsharded units, and fp8 weight copies.

    If parameters are sharded, fp8 weight copies are counted only for units that are temporarily unsharded.
    """
    copies = held.weight_copies
    if config.ddp.drops_parameters(config.parallel) and plan.in_flight.parameters:
        whole = plan.parameters * DTYPE_BYTES[config.parallel.params_dtype]
        copies = copies * plan.in_flight.parameters // max(whole, plan.in_flight.parameters)
    return held.working + copies + plan.in_flight.total
