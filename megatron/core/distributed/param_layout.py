"""Layout of parameters and gradients in flat memory: buffers, buckets, ZeRO-1 shards, and states offloaded to the host.
This module does not import torch.

All parameters of a buffer have the same weight decay, learning rate and optimizer, and their gradients are reduced over
the same ranks. A buffer is divided into buckets, each of which is reduced in one collective. A bucket is divided into
one shard per data-parallel rank. This module computes the layout of all buffers once, from the shapes of the
parameters. Buffers, the distributed optimizer, checkpoints and memory plans use the same layout.

Buckets are filled in reverse registration order, roughly the order in which the backward pass completes gradients, so
that the first buckets are ready first. If gradients or parameters are also sharded (ZeRO-2 and ZeRO-3), a bucket of
matrices contains one unit: a transformer layer, or a module outside of layers. Norms and biases, about 0.1 % of the
elements, remain in ordinary buckets and are not sharded.

Parameters start at multiples of `ALIGNMENT` elements, because GEMM kernels need aligned operands. Buckets are padded
with zeros so that their shards are equal in size and also aligned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megatron.core.config.model import round_up
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.param_groups import ParamGroup
from megatron.core.param_meta import ParamMeta

ALIGNMENT = 64
"""Alignment in elements: each parameter starts at a multiple of this number. An optimizer state may have one scale per
block of elements; a block contains at most this many elements."""

BucketPlace = tuple[int, int]
"""Pair (number of a buffer, number of a bucket within this buffer)."""

DEFAULT = OptimizerConfig()

GroupOf = Callable[[ParamMeta], ParamGroup]
"""Function that returns a parameter's group, such as `OptimizerConfig.group_of`."""


def default_bucket_size(data_parallel_size: int) -> int:
    """Return the default bucket size in elements. At this size, reductions are limited by bandwidth, not by latency."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


@dataclass(frozen=True)
class ParamRange:
    """Location of one parameter: elements [start, stop) of its buffer, without padding."""

    index: int
    """Index of the parameter in the list of parameters for which the layout was planned."""

    meta: ParamMeta
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """Part of a parameter: the elements [start, stop) of the rank's flattened tensor. These elements start at `offset`
    in the buffer."""

    index: int
    meta: ParamMeta
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class BucketLayout:
    """Elements [start, stop) of a buffer that one collective reduces. The elements are divided into `num_shards` shards
    of equal size."""

    start: int
    stop: int
    params: tuple[ParamRange, ...]
    num_shards: int

    def shard(self, rank: int) -> tuple[int, int]:
        """Return the shard range [start, stop) of a data-parallel rank, in elements of the buffer."""
        size = (self.stop - self.start) // self.num_shards
        return self.start + rank * size, self.start + (rank + 1) * size

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """Return the nonempty parts of parameters that are within [start, stop) of the buffer, in order."""
        found = []
        for param in self.params:
            low, high = max(start, param.start), min(stop, param.stop)
            if low < high:
                found.append(Piece(param.index, param.meta, low - param.start, high - param.start, low))
        return tuple(found)


@dataclass(frozen=True)
class BufferLayout:
    """Layout of a contiguous buffer. All parameters in the buffer belong to the same parameter group, and their
    gradients are reduced over the same ranks."""

    expert: bool
    """True if the buffer is reduced over the ranks of the axis "expt_dp" instead of "dp_cp", because it contains
    parameters of experts."""

    group: ParamGroup
    """Parameter group, which determines the learning rate and the weight decay of the buffer's parameters."""

    data_parallel_size: int
    buckets: tuple[BucketLayout, ...]

    whole: bool = False
    """True if the buffer contains only matrices that the optimizer updates as whole matrices."""

    linear: bool = False
    """True if the buffer's parameters are weights of linear layers, which have separate buffers (`linears_apart`)."""

    by_unit: bool = False
    """True if each bucket contains the matrices of one unit.

    In such a buffer, unsharded gradients exist only while the unit is in use. With ZeRO-3 and with unit stores,
    unsharded parameters also exist only while the unit is in use.
    """

    @property
    def numel(self) -> int:
        """Number of elements, including padding."""
        return self.buckets[-1].stop

    def kept(self, shards: bool) -> int:
        """Return how many elements of the buffer a rank keeps between passes. If `shards` is True, the rank keeps only
        its shards of a buffer that contains units.
        """
        return self.numel // self.data_parallel_size if shards and self.by_unit else self.numel

    @cached_property
    def params(self) -> tuple[ParamRange, ...]:
        return tuple(param for bucket in self.buckets for param in bucket.params)


def plan_buffers(
    params: Sequence[tuple[ParamMeta, tuple[int, ...]]],
    data_parallel_size: int,
    expert_data_parallel_size: int = 1,
    bucket_size: int | None = None,
    group_of: GroupOf = DEFAULT.group_of,
    whole_roles: Collection[str] = (),
    linears_apart: bool = False,
    unit_ranks: int | None = None,
) -> tuple[BufferLayout, ...]:
    """Plan the buffers of one rank.

    Ranks whose parameters have the same shapes have the same layout. A parameter that is replicated over
    tensor-parallel ranks, for example, has the same shard ranges on all these ranks.

    Args:
        params: Pair (meta, local shape) of each parameter of the rank, in registration order.
        data_parallel_size: Number of ranks of the axis "dp_cp".
        expert_data_parallel_size: Number of ranks of the axis "expt_dp".
        bucket_size: Minimum number of elements in a bucket. Parameters are added to a bucket until it has this size.
        group_of: Function that returns the parameter group of a parameter.
        whole_roles: Roles of the matrices that the optimizer updates as whole matrices, not element by element.
        linears_apart: Whether to put the weights of linear layers in separate buffers, for all-gathers in another
            number format.
        unit_ranks: The matrices of each unit form a separate bucket if their gradients are reduced over at least this
            number of ranks. If the value is None, no unit has a separate bucket.
    """
    names = [meta.name for meta, _ in params]
    assert len(set(names)) == len(names), f"parameter names must be unique: {sorted(names)}"
    found: dict[tuple[bool, ParamGroup, bool, bool, bool], list[tuple[int, ParamMeta, int]]] = {}
    for index, (meta, shape) in enumerate(params):
        whole, linear = meta.matrix and meta.role in whole_roles, linears_apart and meta.linear
        ranks = expert_data_parallel_size if meta.expert else data_parallel_size
        by_unit = unit_ranks is not None and meta.matrix and ranks >= unit_ranks
        key = (meta.expert, group_of(meta), whole, linear, by_unit)
        found.setdefault(key, []).append((index, meta, prod(shape)))
    buffers = []
    for key in sorted(found, key=lambda key: (key[0], key[1].order, *key[2:])):
        expert, group, whole, linear, by_unit = key
        shards = expert_data_parallel_size if expert else data_parallel_size
        size = None if by_unit else bucket_size or default_bucket_size(shards)
        buckets = tuple(_fill_buckets(reversed(found[key]), shards, size))
        buffers.append(BufferLayout(expert, group, shards, buckets, whole, linear, by_unit))
    return tuple(buffers)


def unit_of(name: str) -> str:
    """Return the name of the unit to which a parameter belongs: the layer that contains the parameter or, outside of
    layers, the module that owns the parameter. `name` is the parameter's name in the whole model.

    >>> unit_of("decoder.layers.3.mlp.linear_fc1.weight"), unit_of("output_layer.weight")
    ('decoder.layers.3', 'output_layer')
    """
    layer = re.match(r"(?:.*?\.)?layers\.\d+(?=\.)", name)
    return layer[0] if layer else name.rpartition(".")[0]


def _fill_buckets(
    members: Iterable[tuple[int, ParamMeta, int]], num_shards: int, bucket_size: int | None
) -> list[BucketLayout]:
    """Fill buckets of at least `bucket_size` elements. If `bucket_size` is None, make one bucket for each unit.

    Only two kinds of buckets may have fewer elements than `bucket_size`: the last bucket, and buckets next to the
    buckets of shared parameters. A parameter shared by two stages has a bucket that contains no other parameter, so
    that shards of the bucket cover the same elements on both stages and can be summed over the stages.
    """
    buckets: list[BucketLayout] = []
    filling: list[ParamRange] = []
    start = cursor = 0

    def close() -> None:
        nonlocal start, cursor, filling
        if filling:
            stop = start + round_up(cursor - start, num_shards * ALIGNMENT)
            buckets.append(BucketLayout(start, stop, tuple(filling), num_shards))
            start = stop
            cursor = stop
            filling = []

    for index, meta, numel in members:
        if meta.shared_stages or (
            bucket_size is None and filling and unit_of(filling[-1].meta.name) != unit_of(meta.name)
        ):
            close()
        filling.append(ParamRange(index, meta, cursor, cursor + numel))
        cursor += round_up(numel, ALIGNMENT)
        if meta.shared_stages or (bucket_size is not None and cursor - start >= bucket_size):
            close()
    close()
    return buckets


def launch_order(buffers: Sequence[BufferLayout]) -> list[BucketPlace]:
    """Return the (buffer, bucket) pairs in the order in which the backward pass completes the buckets. The order is the
    same on every data-parallel rank. A bucket is complete once the gradient of its first registered parameter is
    complete. All ranks of a group must start their reductions in this order, regardless of the order in which gradients
    arrive.
    """
    places = [(b, k) for b, buffer in enumerate(buffers) for k in range(len(buffer.buckets))]
    return sorted(places, key=lambda place: -min(p.index for p in buffers[place[0]].buckets[place[1]].params))


@dataclass(frozen=True)
class StateRange:
    """Range of elements [start, stop) that a rank owns in a bucket. The optimizer states of these elements are either
    all on the device or all on the host."""

    buffer: int
    bucket: int
    start: int
    """Start of the range, counted from the first element that the rank owns in the bucket."""

    stop: int
    on_host: bool

    @property
    def numel(self) -> int:
        return self.stop - self.start


def place_states(buffers: Sequence[BufferLayout], optimizer: OptimizerConfig) -> tuple[StateRange, ...]:
    """Return the locations of a rank's optimizer states, bucket by bucket. The elements that a rank owns in a bucket
    form a single range, unless `OptimizerConfig.host_ranges` divides them between device and host."""
    sharded = optimizer.use_distributed_optimizer
    owned = {
        (b, k): (bucket.stop - bucket.start) // (bucket.num_shards if sharded else 1)
        for b, buffer in enumerate(buffers)
        for k, bucket in enumerate(buffer.buckets)
    }
    on_host = optimizer.host_ranges({place: owned[place] for place in launch_order(buffers)})
    found = []
    for (b, k), numel in owned.items():
        ranges = on_host.get((b, k), ())
        found += [StateRange(b, k, part.start, part.stop, True) for part in ranges]
        cut = ranges[-1].stop if ranges else 0
        if cut < numel:
            found.append(StateRange(b, k, cut, numel, False))
    return tuple(found)
