"""Declarations of the states that the transforms of an optimizer keep, and the plan of how these states are sharded
over the ranks of a pipeline stage. This module does not import torch.

A transform declares its states for a parameter as a function of the parameter's `ParamMeta` alone. There are three
kinds of states:

- `elements`: the state has the shape of the parameter. Each rank stores the range of elements that it updates (ZeRO-1).
- `reduced`: the state has the shape of the parameter, but size 1 in some dims. For example, a state may contain the
  mean of each row. The flat tensor is split evenly over all ranks of the stage.
- `of_matrices`: the state has any shape and exists once for each matrix of the parameter. An example is a factor [m, m]
  or [n, n] of Shampoo. The rank that owns the matrix (`MatrixPlan`) stores the whole state of the matrix.

Memory planning, allocation and checkpoints use the same `ChainPlan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from megatron.core.distributed.param_layout import BucketLayout, BufferLayout, ParamRange, StateRange
from megatron.core.optimizer.matrix_plan import MatrixPlan
from megatron.core.parallel_dims import ParallelDims
from megatron.core.param_meta import ParamMeta

ELEMENTS = "elements"
REDUCED = "reduced"
MATRICES = "matrices"

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Dtypes that a state may have, with the size of an element in bytes."""

FLOAT8 = "float8_e4m3fn"
"""Name of a dtype with one byte per element. Only the states of fused links may have this dtype, because no other
states can have scales."""


@dataclass(frozen=True)
class State:
    """Declaration of a tensor that a transform keeps for one parameter. The initial values of the tensor are zero. The
    functions `elements`, `reduced` and `of_matrices` create `State` objects."""

    name: str
    """Name of the state, which must be the same for all parameters. The key of the state in checkpoints is
    `optimizer.NAME.<parameter>`."""

    shape: tuple[int, ...]
    """Shape of the state in the whole, unsharded model."""

    kind: str

    dtype: str | None = None
    """Name of the dtype. None means the dtype of the main parameters."""

    scale_block: int = 0
    """Number of elements that share a scale, if a fused link stores the state in a one-byte dtype. The value 0 means
    that the state has no scales."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def nbytes(self, numel: int, main: int) -> int:
        """Return the size in bytes of `numel` elements of the state, including their scales. `main` is the element size
        of the main dtype in bytes."""
        width = main if self.dtype is None else (DTYPES | {FLOAT8: 1})[self.dtype]
        return numel * width + (numel // self.scale_block if self.scale_block else 0)


def elements(name: str, meta: ParamMeta, dtype: str | None = None, scale_block: int = 0) -> State:
    """Declare a state that has one element for each element of the parameter.

    A fused link may store one scale for each block of `scale_block` elements.
    """
    return State(name, meta.global_shape, ELEMENTS, dtype, scale_block)


def reduced(name: str, meta: ParamMeta, *dims: int, dtype: str | None = None) -> State:
    """Declare a state that has the parameter's shape, except that its size is 1 in the dims `dims`.

    For a matrix, dim -1 gives one element per row, and dim -2 one element per column. If no `dims` are given, the state
    has a single element.
    """
    return State(name, reduced_shape(meta, dims), REDUCED, dtype)


def of_matrices(name: str, meta: ParamMeta, *shape: int, dtype: str | None = None) -> State:
    """Declare one state of shape `shape` for each matrix of the parameter. The function `matrix_size` returns the size
    of each matrix."""
    return State(name, (*meta.global_shape[: meta.stacked], *shape), MATRICES, dtype)


def matrix_size(meta: ParamMeta) -> tuple[int, int]:
    """Return the number of rows and the number of columns of each matrix of a parameter.

    The last dim of the parameter contains the columns. The first `meta.stacked` dims stack several matrices, and the
    dims in between contain the rows.
    """
    return prod(meta.global_shape[meta.stacked : -1]), meta.global_shape[-1]


def reduced_shape(meta: ParamMeta, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the parameter's shape, with the sizes of `dims` replaced by 1. If `dims` is empty, all sizes are replaced
    by 1."""
    rank = len(meta.global_shape)
    chosen = {dim % rank for dim in dims} if dims else set(range(rank))
    return tuple(1 if dim in chosen else size for dim, size in enumerate(meta.global_shape))


def check_states(meta: ParamMeta, states: Sequence[State]) -> None:
    """Raise ValueError if one of the states is not valid for the parameter. The message lists all errors."""
    names = [state.name for state in states]
    errors = [f"two states are named {name}" for name in sorted(set(names)) if names.count(name) > 1]
    errors += [
        f"state {name!r} must have a single word other than main_param as its name"
        for name in names
        if not name.isidentifier() or name == "main_param"
    ]
    for state in states:
        if state.dtype is not None and state.dtype not in DTYPES:
            errors.append(f"state {state.name} has dtype {state.dtype}, but must be one of {', '.join(DTYPES)}")
        if state.scale_block:
            errors.append(
                f"state {state.name} has block scales, but only the states of a fused link may have block scales"
            )
        if state.kind == MATRICES and not meta.matrix:
            errors.append(f"state {state.name} is a state of matrices, but the parameter is not a matrix")
    if errors:
        raise ValueError(f"optimizer states of {meta.name} {list(meta.global_shape)}: " + "; ".join(errors))


@dataclass(frozen=True)
class PlannedParam:
    """Parameter of a pipeline stage, with its location in the buffers and its optimizer states."""

    meta: ParamMeta
    place: tuple[int, int]
    """Index of the buffer, and index of the bucket in the buffer."""

    bucket: BucketLayout
    range: ParamRange
    states: tuple[State, ...]

    def part_within(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of elements of the parameter's local tensor that lie within the elements [first, last) of
        the buffer. Return (0, 0) if there are no such elements."""
        start, stop = max(first, self.range.start), min(last, self.range.stop)
        return (start - self.range.start, stop - self.range.start) if start < stop else (0, 0)


class ChainPlan:
    """Plan of the states that optimizer chains keep for the parameters of one pipeline stage. The plan does not contain
    the states of fused links, because these states are stored in the shards.

    Args:
        layouts: Layouts of the buffers of the stage's ranks.
        ranks: Ranks of the stage.
        states_of: Function that returns the states of a parameter.
        whole: Predicate that returns True for a parameter whose matrices are exchanged between ranks although the
            parameter has no matrix state.
        ranges: Result of `place_states`.
    """

    def __init__(
        self,
        layouts: Sequence[BufferLayout],
        states_of: Callable[[ParamMeta], Sequence[State]],
        whole: Callable[[ParamMeta], bool],
        dims: ParallelDims,
        ranks: Sequence[int],
        distributed: bool,
        ranges: Sequence[StateRange] = (),
    ) -> None:
        self.ranks, self.distributed = tuple(ranks), distributed
        self._on_host = Counter[tuple[int, int]]()
        for place in ranges:
            self._on_host[place.buffer, place.bucket] += place.numel * place.on_host
        self.params = [
            PlannedParam(param.meta, (b, k), bucket, param, tuple(states_of(param.meta)))
            for b, layout in enumerate(layouts)
            for k, bucket in enumerate(layout.buckets)
            for param in bucket.params
        ]
        for param in self.params:
            check_states(param.meta, param.states)
        exchanged = {
            param.meta.name
            for param in self.params
            if any(state.kind == MATRICES for state in param.states) or whole(param.meta)
        }
        self.matrices = MatrixPlan(
            layouts, dims, ranks, distributed, lambda fused: False, wanted=lambda meta: meta.name in exchanged
        )
        self._data_rank = {
            axis: {rank: i for group in dims.instance_groups(*names) for i, rank in enumerate(group)}
            for axis, names in (("dp_cp", ("dp", "cp")), ("expt_dp", ("expt_dp",)))
        }

    def owned_range(self, param: PlannedParam, place: int) -> tuple[int, int]:
        """Return the range [start, stop) of buffer elements that `ranks[place]` updates in the bucket of a
        parameter."""
        if not self.distributed:
            return param.bucket.start, param.bucket.stop
        return param.bucket.shard(self._data_rank[param.meta.data_axis][self.ranks[place]])

    def part(self, state: State, place: int) -> tuple[int, int]:
        """Return the range [start, stop) of the elements of a `reduced` state that are stored on `ranks[place]`."""
        length = self.part_length(state.numel)
        return min(state.numel, place * length), min(state.numel, (place + 1) * length)

    def part_length(self, numel: int) -> int:
        """Return the number of elements per rank if `numel` elements of a `reduced` state are divided evenly among the
        ranks. The number is rounded up."""
        return -(-numel // len(self.ranks))

    def owned(self, param: PlannedParam, state: State, place: int) -> list[tuple[int, int, int]]:
        """Return a tuple (matrix number, start, stop) for each matrix of `param` that `ranks[place]` owns. The elements
        [start, stop) of the state belong to the matrix."""
        numbers = self.matrices.numbers(param.meta.name)
        size = state.numel // len(numbers)
        return [(n, i * size, (i + 1) * size) for i, n in enumerate(numbers) if self.matrices.owners[n] == place]

    def bytes_by_place(self, main: int, on_host: bool = False) -> list[int]:
        """Return the size in bytes of the states on each rank of the stage. If `on_host` is True, count the states in
        host memory. Otherwise, count the states on the device. `main` is the element size of the main dtype in
        bytes."""
        size, data = len(self.ranks), {axis: [0] * len(self.ranks) for axis in self._data_rank}
        steps, further = [0] * (size + 1), [0] * (size + 1)
        """A `reduced` state is divided into full parts of equal length, and a shorter last part. `steps[i]` is the
        number of bytes of full parts on rank i minus the number of bytes of full parts on rank i - 1. `further[i]` is
        the number of bytes of shorter parts and matrix states on rank i."""
        for param in self.params:
            for state in param.states:
                width = state.nbytes(1, main)
                if state.kind == ELEMENTS:
                    for shard, numel in self._by_shard(param, on_host):
                        data[param.meta.data_axis][shard] += numel * width
                elif on_host:
                    continue
                elif state.kind == REDUCED:
                    length = self.part_length(state.numel)
                    full, rest = divmod(state.numel, length)
                    steps[0], steps[full] = steps[0] + length * width, steps[full] - length * width
                    further[full] += rest * width
                else:
                    numbers = self.matrices.numbers(param.meta.name)
                    for number in numbers:
                        further[self.matrices.owners[number]] += state.numel // len(numbers) * width
        reduced_bytes = list(accumulate(steps))
        return [
            sum(data[axis][ranks[rank]] for axis, ranks in self._data_rank.items()) + reduced_bytes[i] + further[i]
            for i, rank in enumerate(self.ranks)
        ]

    def _by_shard(self, param: PlannedParam, on_host: bool) -> Iterator[tuple[int, int]]:
        """Yield a pair (data-parallel rank, number of elements) for each data-parallel rank that updates elements of
        the parameter. If `on_host` is True, count the elements that are updated on the host. Otherwise, count the
        elements that are updated on the device."""
        bucket, shards = param.bucket, range(param.bucket.num_shards)
        if self.distributed:
            length = (bucket.stop - bucket.start) // bucket.num_shards
            first, last = param.range.start - bucket.start, param.range.stop - 1 - bucket.start
            shards = range(first // length, last // length + 1)
        for shard in shards:
            low, high = bucket.shard(shard) if self.distributed else (bucket.start, bucket.stop)
            cut = low + self._on_host[param.place]
            start, stop = param.part_within(*((low, cut) if on_host else (cut, high)))
            yield shard, stop - start
