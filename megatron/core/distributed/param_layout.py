"""Where parameters and gradients lie in flat memory, and which rank owns what of it.

Parameters are grouped into buffers, as whether weight decay applies and which ranks they are reduced over must be one
answer for a flat tensor. A buffer is cut into buckets, each the subject of one reduction, and each bucket into one
shard per data-parallel rank. All of it is decided here from integers, once: the buffers in memory, the distributed
optimizer, checkpoints and memory plans read the same layout. No torch here.

A bucket is filled in reverse order of registration, which is about the order in which backward finishes gradients, so
the first buckets are ready first. Parameters begin at multiples of `ALIGNMENT` elements (matrix kernels want aligned
operands) and a bucket is padded so that its shards are equal and aligned too; padding holds zeros for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megatron.core.config.model import round_up
from megatron.core.param_meta import ParamMeta
from megatron.core.parts import OPTIMIZERS

ALIGNMENT = 64
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def default_bucket_size(data_parallel_size: int) -> int:
    """Elements of a bucket: large enough that each rank's part of a reduction is bound by bandwidth, not latency."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


@dataclass(frozen=True)
class ParamRange:
    """One parameter's place: elements [start, stop) of its buffer, padding excluded."""

    index: int
    """Position in the list that was planned from."""

    meta: ParamMeta
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a parameter's local tensor, flattened row-major, from `offset` of its buffer on."""

    index: int
    meta: ParamMeta
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class BucketLayout:
    """Elements [start, stop) of a buffer, reduced at once; `num_shards` equal shards."""

    start: int
    stop: int
    params: tuple[ParamRange, ...]
    num_shards: int

    def shard(self, rank: int) -> tuple[int, int]:
        """[start, stop) in the buffer of what a data-parallel rank owns."""
        size = (self.stop - self.start) // self.num_shards
        return self.start + rank * size, self.start + (rank + 1) * size

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """The parts of parameters that lie within [start, stop) of the buffer, in order; none is empty."""
        found = []
        for param in self.params:
            low, high = max(start, param.start), min(stop, param.stop)
            if low < high:
                found.append(Piece(param.index, param.meta, low - param.start, high - param.start, low))
        return tuple(found)


@dataclass(frozen=True)
class BufferLayout:
    """One contiguous memory: parameters that are reduced over the same ranks and decay alike."""

    expert: bool
    """Reduced over "expt_dp" instead of "dp_cp"."""

    decays: bool
    """Whether weight decay applies."""

    data_parallel_size: int
    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].stop

    @cached_property
    def params(self) -> tuple[ParamRange, ...]:
        return tuple(param for bucket in self.buckets for param in bucket.params)


def plan_buffers(
    params: Sequence[tuple[ParamMeta, tuple[int, ...]]],
    data_parallel_size: int,
    expert_data_parallel_size: int = 1,
    bucket_size: int | None = None,
) -> tuple[BufferLayout, ...]:
    """The buffers of one rank, from the tag and local shape of each of its parameters in order of registration.

    `data_parallel_size` counts the ranks of "dp_cp", `expert_data_parallel_size` those of "expt_dp". A bucket is
    closed once it holds `bucket_size` elements. Ranks whose parameters have equal shapes get equal layouts, so what
    is replicated over tp has the same shard ranges on every tp rank.
    """
    names = [meta.name for meta, _ in params]
    assert len(set(names)) == len(names), f"parameter names must be unique: {sorted(names)}"
    buffers = []
    for expert, decays in ((False, True), (False, False), (True, True), (True, False)):
        members = [
            (index, meta, prod(shape))
            for index, (meta, shape) in enumerate(params)
            if (meta.expert, meta.decays) == (expert, decays)
        ]
        if members:
            shards = expert_data_parallel_size if expert else data_parallel_size
            buckets = _fill_buckets(reversed(members), shards, bucket_size or default_bucket_size(shards))
            buffers.append(BufferLayout(expert, decays, shards, tuple(buckets)))
    return tuple(buffers)


def _fill_buckets(
    members: Iterable[tuple[int, ParamMeta, int]], num_shards: int, bucket_size: int
) -> list[BucketLayout]:
    """Buckets of at least `bucket_size` elements, except at the end and around parameters that two stages share.

    Those have a bucket to themselves: its shards then cover the same elements on both stages, whatever else the
    stages hold, and their sum over the stages needs the shards only.
    """
    buckets: list[BucketLayout] = []
    filling: list[ParamRange] = []
    start = cursor = 0

    def close() -> None:
        nonlocal start, cursor, filling
        if filling:
            stop = start + round_up(cursor - start, num_shards * ALIGNMENT)
            buckets.append(BucketLayout(start, stop, tuple(filling), num_shards))
            start, cursor, filling = stop, stop, []

    for index, meta, numel in members:
        if meta.shared_stages:
            close()
        filling.append(ParamRange(index, meta, cursor, cursor + numel))
        cursor += round_up(numel, ALIGNMENT)
        if cursor - start >= bucket_size or meta.shared_stages:
            close()
    close()
    return buckets


def launch_order(buffers: Sequence[BufferLayout]) -> list[tuple[int, int]]:
    """(buffer, bucket) in the order in which backward completes them, the same on every data-parallel rank.

    A bucket is complete once its first registered parameter is. All ranks of a group must start their reductions in
    one order; this is that order, whatever order gradients happen to arrive in.
    """
    places = [(b, k) for b, buffer in enumerate(buffers) for k in range(len(buffer.buckets))]
    return sorted(places, key=lambda place: -min(p.index for p in buffers[place[0]].buckets[place[1]].params))


@dataclass(frozen=True)
class BufferBytes:
    """Bytes of one rank's training state, padding included."""

    parameters: int
    gradients: int
    main_parameters: int
    """0 where the parameters themselves have the main dtype."""

    moments: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.main_parameters + self.moments


def buffer_bytes(
    buffers: Sequence[BufferLayout],
    params_dtype: str,
    main_dtype: str,
    distributed_optimizer: bool,
    optimizer: str = "adam",
) -> BufferBytes:
    """What the buffers and the optimizer's state take on one rank. Exact but for a scalar step count per bucket."""
    whole = sum(buffer.numel for buffer in buffers)
    owned = sum(buffer.numel // (buffer.data_parallel_size if distributed_optimizer else 1) for buffer in buffers)
    main = DTYPE_BYTES[main_dtype]
    return BufferBytes(
        parameters=whole * DTYPE_BYTES[params_dtype],
        gradients=whole * main,
        main_parameters=0 if params_dtype == main_dtype else owned * main,
        moments=owned * main * len(OPTIMIZERS.facts(optimizer).states),
    )
