"""Memory of parameters, gradients and optimizer state per rank, from the shapes of the parameters. No torch.

Buffers are planned by the function that lays them out in memory, so the bytes are the allocator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.distributed.param_layout import BufferLayout, host_slots, place_states, plan_buffers, unit_of
from megatron.core.parallel_dims import ParallelDims
from megatron.core.param_meta import ParamMeta
from megatron.core.parts import param_gather, update_ahead
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.core.pipeline_parallel.stages import Stage, pipeline_layout, pipeline_stages, tied_stages

EMBEDDING = "embedding.word_embeddings"

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class BufferBytes:
    """Bytes of one rank's parameters, gradients and optimizer state, padding included: on the device, but for those of
    `host`."""

    parameters: int
    gradients: int
    main_parameters: int
    """0 if the parameters themselves have the main dtype."""

    moments: int

    host_states: int = 0
    """Main parameters and moments in host memory."""

    host_slots: int = 0
    """Gradients and parameters that pass through host memory."""

    rollback: int = 0
    """Copies of this rank's main parameters, moments and gradients, of updates ahead of the norm."""

    @property
    def optimizer(self) -> int:
        """Of the optimizer, on the device."""
        return self.main_parameters + self.moments + self.rollback

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> int:
        """In host memory."""
        return self.host_states + self.host_slots


def buffer_bytes(
    buffers: Sequence[BufferLayout],
    params_dtype: str,
    main_dtype: str,
    optimizer: OptimizerConfig,
    shards_parameters: bool = False,
) -> BufferBytes:
    """Memory of buffers and optimizer state on one rank. Exact except for a scalar step count per range of states.

    Of buffers `by_unit` what stays counts: whole units come on top.
    """
    main, params = DTYPE_BYTES[main_dtype], DTYPE_BYTES[params_dtype]
    plan = optimizer.state_plan
    gradient = DTYPE_BYTES[optimizer.gradients_dtype or main_dtype]
    ranges = place_states(buffers, optimizer)
    mains, moments = {False: 0, True: 0}, {False: 0, True: 0}
    for place in ranges:
        kind = plan.main_kind(optimizer, params_dtype, main_dtype, place.on_host)
        mains[place.on_host] += plan.main_bytes(place.numel, kind, main)
        for name in optimizer.states(buffers[place.buffer].whole):
            moments[place.on_host] += plan.state_bytes(optimizer, place.numel, name, main)
    slots, size = host_slots(ranges)
    rollback = 0
    if update_ahead(optimizer) is not None:
        aliased = plan.main_kind(optimizer, params_dtype, main_dtype) == "aliased"
        owned = sum(place.numel for place in ranges) * (gradient + (params if aliased else 0))
        rollback = owned + mains[False] + moments[False]
    return BufferBytes(
        parameters=sum(buffer.kept(shards_parameters) for buffer in buffers) * params,
        gradients=sum(buffer.kept(True) for buffer in buffers) * gradient,
        main_parameters=mains[False],
        moments=moments[False],
        host_states=mains[True] + moments[True],
        host_slots=slots * size * (gradient + params),
        rollback=rollback,
    )


@dataclass(frozen=True)
class UnitsInFlight:
    """Bytes of whole parameters (ZeRO-3) and whole gradients (ZeRO-2 and ZeRO-3) of units at their peaks."""

    parameters: int = 0
    gradients: int = 0

    reductions: int = 0
    """What reductions take beside whole gradients: the sum that a rank receives, and a copy rounded for it."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.reductions


@dataclass(frozen=True)
class RankStates:
    """What each rank of one pipeline rank holds; ranks that differ in tp, cp and dp hold as much."""

    pp_rank: int
    stages: tuple[Stage, ...]
    metas: tuple[ParamMeta, ...]
    parameters: int
    """Elements of the rank's own shards, padding not included."""

    memory: BufferBytes

    in_flight: UnitsInFlight


def states_of_rank(
    model: TransformerConfig,
    parallel: ModelParallelConfig,
    optimizer: OptimizerConfig,
    ddp: DDPConfig,
    dims: ParallelDims,
    pp_rank: int,
) -> RankStates:
    """Parameters and bytes of states of the ranks at `pp_rank`."""
    layout, stages = pipeline_layout(model, parallel), pipeline_stages(model, parallel)
    mine = [stages[s] for s in layout.stages_of(pp_rank)]
    metas = _metas_of(model, parallel, mine, tied_stages(model, layout))
    shapes = [(meta, local_shape(meta, dims)) for meta in metas]
    trained = [(meta, shape) for meta, shape in shapes if not optimizer.freezes(meta.name)]
    sizes = dims.shards(False), dims.shards(True), ddp.ddp_bucket_size
    apart = param_gather(parallel) is not None
    buffers = plan_buffers(trained, *sizes, optimizer.group_of, optimizer.whole_roles, apart, ddp.shards_gradients)
    dtypes = parallel.params_dtype, parallel.main_dtype
    memory = buffer_bytes(buffers, *dtypes, optimizer, ddp.shards_parameters)
    frozen = sum(prod(shape) for meta, shape in shapes if optimizer.freezes(meta.name))
    memory = replace(memory, parameters=memory.parameters + frozen * DTYPE_BYTES[parallel.params_dtype])
    elements = sum(prod(shape) for _, shape in shapes)
    in_flight = _units_in_flight(buffers, model, parallel, ddp, mine)
    return RankStates(pp_rank, tuple(mine), metas, elements, memory, in_flight)


def _units_in_flight(
    buffers: Sequence[BufferLayout],
    model: TransformerConfig,
    parallel: ModelParallelConfig,
    ddp: DDPConfig,
    stages: Sequence[Stage],
) -> UnitsInFlight:
    """Two units at a time are whole: the one that is computed and the next one; or, of gradients, the one that is
    computed and the bucket that is reduced. Exact for one stage a rank without multi-token prediction, one unit too
    few or too many otherwise."""
    sizes: dict[str, list[int]] = {}
    reductions: dict[str, int] = {}
    buckets = [bucket for buffer in buffers if buffer.by_unit for bucket in buffer.buckets]
    for bucket in sorted(buckets, key=lambda bucket: min(place.index for place in bucket.params)):
        size, unit = bucket.stop - bucket.start, unit_of(bucket.params[0].meta.name)
        sizes.setdefault(unit, []).append(size)
        reductions[unit] = _reduction_bytes(size, bucket.num_shards, parallel, ddp)  # of the last bucket
    if not sizes:
        return UnitsInFlight()
    units, held, first, last = list(sizes), 0, stages[0].first, stages[-1].last
    backward = units
    if model.tied_embeddings and last and EMBEDDING in sizes:  # the output layer's unit is the embedding
        backward = inner = [unit for unit in units if unit != EMBEDDING]
        units = [*(units if first else inner), EMBEDDING]
        if first:  # its gradient is whole from one end of the backward to the other
            held = sum(sizes[EMBEDDING])
        else:
            backward = units
    wholes = [sum(sizes[unit]) for unit in units]
    pairs = [(a, b) for a, b in pairwise(range(len(units))) if units[a] != units[b]]
    if parallel.pipeline_model_parallel_size > 1 and len(units) > 1:
        pairs.append((len(units) - 1, 0))  # from the end of one forward pass to the next one
    gathered = max([*wholes, *(wholes[a] + wholes[b] for a, b in pairs)]) if ddp.shards_parameters else 0
    wide = DTYPE_BYTES[parallel.main_dtype]
    reduced = [((sum(sizes[a]) + sizes[b][-1]) * wide, reductions[b]) for a, b in pairwise(backward)]
    reduced += [(sum(sizes[unit]) * wide, 0) for unit in backward]
    gradients = max(grads for grads, _ in reduced)
    with_sums = max(map(sum, reduced))
    return UnitsInFlight(gathered * DTYPE_BYTES[parallel.params_dtype], held * wide + gradients, with_sums - gradients)


def _reduction_bytes(size: int, num_shards: int, parallel: ModelParallelConfig, ddp: DDPConfig) -> int:
    """Bytes that the reduction of `size` elements takes beside them. Blocks that gloo exchanges are not counted: GPUs
    have none."""
    dtype = parallel.params_dtype if ddp.grad_reduce_in_bf16 else parallel.main_dtype
    rounded = size if dtype != parallel.main_dtype else 0
    return (rounded + size // num_shards) * DTYPE_BYTES[dtype]


def _metas_of(
    model: TransformerConfig, parallel: ModelParallelConfig, stages: Sequence[Stage], tied: tuple[int, ...]
) -> tuple[ParamMeta, ...]:
    """The parameters of a rank's stages; a tied embedding that two of them share is held once."""
    found: dict[str, ParamMeta] = {}
    for stage in stages:
        metas = stage_metas(model, stage, sequence_parallel=parallel.sequence_parallel, tied_stages=tied)
        for meta in metas:
            found.setdefault(meta.name, meta)
    return tuple(found.values())


def local_shape(meta: ParamMeta, dims: ParallelDims) -> tuple[int, ...]:
    """Shape of the part of a parameter that each rank holds; all parts are equal."""
    return meta.box({axis: (0, dims.size(axis)) for axis in meta.sharded})[1]
