"""Plan that assigns each matrix of a pipeline stage to one rank, and states where the parts of the matrix are stored.
This module does not import torch.

Main parameters, gradients and momentum are sharded by tensor parallelism, expert parallelism and ZeRO-1, and each rank
stores flat shards. An operation on a whole matrix needs all parts of the matrix on one rank. Therefore, one rank of the
stage is the owner of the matrix. The owner receives the parts of the matrix, transforms the whole matrix, and sends the
transformed parts back. In this way, each matrix is transformed by one rank only. Each rank sends its parts of a matrix
at most once, and receives the transformed parts once.

All ranks of a stage have parameters with the same names and shapes, so they all compute the same plan without
communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate, pairwise, product
from math import prod

from megatron.core.boxes import boxes_of_flat_range, overlap
from megatron.core.distributed.param_layout import BufferLayout, ParamRange
from megatron.core.parallel_dims import ParallelDims
from megatron.core.param_meta import ParamMeta

ROUND = 2**26
"""Maximum number of matrix elements that a rank gathers in one round. A larger matrix is gathered in a separate round.
`ROUND` bounds the memory that an exchange of matrices needs."""


@dataclass(frozen=True)
class Matrix:
    """Matrix within a parameter. The matrix is a rectangular block of the parameter with the given offset and shape.
    The last dim of the block contains the columns of the matrix, and all other dims contain its rows."""

    meta: ParamMeta
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Number of rows and number of columns."""
        return prod(self.shape[:-1]), self.shape[-1]

    @property
    def cost(self) -> int:
        """Number of scalar multiplications in one Newton-Schulz step on the matrix (see `newton_schulz`)."""
        short, long = sorted(self.size)
        return 2 * short * short * long + short**3


@dataclass(frozen=True)
class Part:
    """Rectangular block of a matrix that is stored on one rank."""

    matrix: int
    """Number of the matrix."""

    shard: int
    """Index of the optimizer shard that contains the part, among the shards of all buffers in the plan."""

    start: int
    stop: int
    """End of the range of shard elements. The elements [start, stop) are a block of shape `held` in row-major order.
    This block contains the part."""

    held: tuple[int, ...]
    within: tuple[slice, ...]
    """Slices that select the part within the block of shape `held`."""

    place: tuple[slice, ...]
    """Slices that select the part within the whole matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(cut.stop - cut.start for cut in self.place)

    @property
    def numel(self) -> int:
        return prod(self.shape)


class MatrixPlan:
    """Plan for exchanging parts of matrices between the ranks of a pipeline stage. By default, the plan contains the
    matrices of all buffers whose parameters are updated as whole matrices (`BufferLayout.whole`).

    Args:
        layouts: Layouts of the buffers of the stage's ranks.
        ranks: Ranks of the stage.
        splits: Predicate that takes the name of a kind of fused weight (`Fused.name`), and returns True if such weights
            are split into their linear maps.
        blockwise: Whether to treat each tensor-parallel shard as a separate matrix.
        round_size: Maximum number of elements that a rank gathers in one round. The default is `ROUND`.
        wanted: Predicate that selects the parameters whose matrices are in the plan. If `wanted` is given, parameters
            of all buffers can be selected.
    """

    def __init__(
        self,
        layouts: Sequence[BufferLayout],
        dims: ParallelDims,
        ranks: Sequence[int],
        distributed: bool,
        splits: Callable[[str], bool] = lambda name: True,
        blockwise: bool = False,
        round_size: int | None = None,
        wanted: Callable[[ParamMeta], bool] | None = None,
    ) -> None:
        self.dims = dims
        self.ranks = tuple(ranks)
        self.distributed = distributed
        self._layouts = [layout for layout in layouts if layout.whole or wanted is not None]
        self._data_rank = {
            axis: {rank: i for group in dims.groups(*names) for i, rank in enumerate(group)}
            for axis, names in (("dp_cp", ("dp", "cp")), ("expt_dp", ("expt_dp",)))
        }
        self._sizes = {axis: dims.size(axis) for axis in ("tp", "ep", "expt_tp")}
        self._coords = {rank: dims.coords(rank) for rank in self.ranks}
        self._numbers: dict[str, list[int]] = {}
        self.matrices: list[Matrix] = []
        for layout in self._layouts:
            for param in layout.params:
                if wanted is not None and not wanted(param.meta):
                    continue
                found = list(self._matrices_of(param.meta, splits, blockwise))
                self._numbers[param.meta.name] = list(range(len(self.matrices), len(self.matrices) + len(found)))
                self.matrices += found
        self.owners = balanced([matrix.cost for matrix in self.matrices], len(self.ranks))
        """Rank that owns each matrix, as an index into `ranks`."""
        self.rounds = self._in_rounds(round_size or ROUND)
        """Numbers of the matrices that are gathered together, one list per round."""

    def _matrices_of(self, meta: ParamMeta, splits: Callable[[str], bool], blockwise: bool) -> Iterator[Matrix]:
        whole = linear_maps(meta, meta.fused is not None and splits(meta.fused.name))
        if not blockwise:
            yield from (Matrix(meta, offset, shape) for offset, shape in whole)
            return
        shards = list(dict.fromkeys(self._box(meta, rank) for rank in self.ranks))
        for offset, shape in whole:
            for shard in shards:
                if common := overlap(*shard, offset, shape):
                    start = tuple(o + cut.start for o, cut in zip(offset, common[1], strict=True))
                    yield Matrix(meta, start, tuple(cut.stop - cut.start for cut in common[1]))

    def _in_rounds(self, round_size: int) -> list[list[int]]:
        rounds: list[list[int]] = []
        for owner in range(len(self.ranks)):
            number, filled = 0, 0
            for matrix in self.owned(owner):
                numel = prod(self.matrices[matrix].shape)
                if filled and filled + numel > round_size:
                    number, filled = number + 1, 0
                filled += numel
                rounds += [[] for _ in range(number + 1 - len(rounds))]
                rounds[number].append(matrix)
        return [sorted(matrices) for matrices in rounds]

    def owned(self, place: int) -> list[int]:
        """Return the numbers of the matrices that `ranks[place]` owns, sorted by matrix size."""
        mine = [number for number, owner in enumerate(self.owners) if owner == place]
        return sorted(mine, key=lambda number: (self.matrices[number].size, number))

    def numbers(self, name: str) -> Sequence[int]:
        """Return the numbers of the matrices of the parameter `name`, sorted by their offset in the parameter."""
        return self._numbers[name]

    def parts(self, place: int, wanted: Sequence[int] | None = None) -> dict[int, list[Part]]:
        """Return the parts of matrices that are stored on `ranks[place]`, keyed by matrix number. If `wanted` is given,
        return only the parts of the matrices in `wanted`."""
        rank, found = self.ranks[place], dict[int, list[Part]]()
        chosen = None if wanted is None else set(wanted)
        for shard, param, flat, start, stop in self._held(rank):
            numbers = [n for n in self._numbers.get(param.meta.name, ()) if chosen is None or n in chosen]
            if not numbers:
                continue
            box = self._box(param.meta, rank)
            for held in boxes_of_flat_range(*box, start, stop):
                at = flat + held.start - start
                for number in numbers:
                    matrix = self.matrices[number]
                    if common := overlap(held.offset, held.shape, matrix.offset, matrix.shape):
                        part = Part(number, shard, at, at + held.stop - held.start, held.shape, *common)
                        found.setdefault(number, []).append(part)
        return found

    def sends(self, source: int, matrix: int) -> bool:
        """Return True if `ranks[source]` sends its parts of a matrix to the rank that owns the matrix.

        If the parameter is replicated, several ranks hold the same parts, but only one of these ranks sends them. The
        sending rank has the same coordinates as the owner on all replicated axes.
        """
        meta, owner = self.matrices[matrix].meta, self.owners[matrix]
        a, b = self.ranks[source], self.ranks[owner]
        data = self._data_rank[meta.data_axis]
        same_data = self.distributed or data[a] == data[b]
        return same_data and all(self._coords[a][axis] == self._coords[b][axis] for axis in meta.replica_axes)

    def _held(self, rank: int) -> Iterator[tuple[int, ParamRange, int, int, int]]:
        """Yield one tuple for each range of parameter elements that `rank` updates. The tuple contains the index of the
        shard, the parameter, the position of the range in the shard, and the start and the end of the range in the
        parameter's local tensor."""
        buckets = [(layout, bucket) for layout in self._layouts for bucket in layout.buckets]
        for shard, (layout, bucket) in enumerate(buckets):
            data_rank = self._data_rank["expt_dp" if layout.expert else "dp_cp"][rank]
            low, high = bucket.shard(data_rank) if self.distributed else (bucket.start, bucket.stop)
            for param in bucket.params:
                start, stop = max(low, param.start), min(high, param.stop)
                if start < stop:
                    yield shard, param, start - low, start - param.start, stop - param.start

    def _box(self, meta: ParamMeta, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return meta.box({axis: (self._coords[rank][axis], size) for axis, size in self._sizes.items()})


def balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """Distribute costs over ranks so that the sums of the ranks are nearly equal, and return the rank of each cost. The
    costs are processed in descending order, and each cost is assigned to the rank with the smallest sum so far.

    This greedy algorithm is Graham's LPT rule (longest processing time first). The largest sum is at most 4/3 of the
    largest sum of an optimal distribution.
    """
    heap, owners = [(0, rank) for rank in range(ranks)], [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        total, owners[i] = heap[0]
        heapreplace(heap, (total + costs[i], owners[i]))
    return owners


def linear_maps(meta: ParamMeta, split: bool = True) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each linear map (matrix) that the parameter contains, yield the offset and the shape of the map's block in
    the global tensor.

    The last dim of a block contains the columns of the matrix, and all other dims contain its rows. If `split` is
    False, a weight that fuses several linear maps (`meta.fused`) counts as a single map.
    """
    spans = [[(i, 1) for i in range(size)] for size in meta.global_shape[: meta.stacked]]
    spans += [[(0, size)] for size in meta.global_shape[meta.stacked :]]
    if split and meta.fused is not None:
        assert sum(meta.fused.sizes) == meta.global_shape[meta.fused.dim], f"{meta.name}: {meta.fused}"
        cuts = accumulate(meta.fused.sizes, initial=0)
        spans[meta.fused.dim] = [(start, stop - start) for start, stop in pairwise(cuts)]
    for box in product(*spans):
        yield tuple(start for start, _ in box), tuple(size for _, size in box)
