"""Norms of weights, gradients and updates, by parameter and tensor-parallel rank.

Under any sharding strategy, each rank sums the squares of the elements in its data-parallel shard. If several
tensor-parallel ranks hold replicas of an element, the sum over all ranks therefore counts the element once for each of
these tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.distributed.param_layout import ALIGNMENT, Piece
from megatron.core.host_to_device import integers_on
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Shard
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.core.torch_private import foreach_norm, foreach_sub_

QUANTITIES = ("weight_norm", "grad_norm", "update_norm")
"""Measured norms of a parameter: weights after a step, gradient before clipping, and change of the weights."""


@dataclass(frozen=True)
class _Part:
    """Range of elements [start, stop) in the optimizer's shard of one bucket. This rank adds the squares of these
    elements to its sums."""

    shard: Shard
    start: int
    stop: int
    pieces: tuple[tuple[str, int, int], ...]
    """A tuple (name, start, stop) for each parameter that this rank counts. `start` and `stop` are offsets within this
    part, in elements. The offsets are multiples of `ALIGNMENT`, because a range includes the padding after its
    parameter, which is zero.
    """


class ParameterSquares:
    """One rank's table of sums of squares, a float64 tensor [tp, parameters, quantities]. The entries of other
    tensor-parallel ranks are 0.

    If a parameter is replicated over tensor-parallel ranks, each of these ranks counts its own replica, so that the
    replicas can be compared. If a parameter is replicated for another reason, such as a tied embedding, only its first
    replica is counted. Frozen parameters are not counted.
    """

    def __init__(self, optimizer: DistributedOptimizer, state: ParallelState, rows: Mapping[str, int]) -> None:
        """Create the table. `rows` maps the name of each trained parameter of the model to its index in the table."""
        self.tp, self.device = state.tp, optimizer.ddp.device
        self.shape = state.tp.size, len(rows), len(QUANTITIES)
        parts = (_part(shard, state) for shard in optimizer.shards)
        self._parts = [part for part in parts if part.pieces]
        found = (rows[name] for part in self._parts for name, _, _ in part.pieces)
        self._rows = integers_on(self.device, found)
        self._before: list[Tensor] = []
        self._gradients: Tensor | None = None

    @torch.no_grad()
    def before_update(self, factor: Tensor) -> None:
        """Compute the squared norms of the gradients, which are scaled by `factor` as in the optimizer. A copy of this
        rank's main parameters is kept until `after_update` is called.
        """
        grads = [part.shard.bucket.owned_grads[part.start : part.stop] for part in self._parts]
        self._gradients = self._squares(grads) * factor.square()
        self._before = [part.shard.read_main(part.start, part.stop).clone() for part in self._parts]

    @torch.no_grad()
    def after_update(self) -> Tensor:
        """Return the table of this step as a flat tensor."""
        assert self._gradients is not None, "before_update has not been called"
        after = [part.shard.read_main(part.start, part.stop) for part in self._parts]
        if after:
            foreach_sub_(self._before, after)
        columns = self._squares(after), self._gradients, self._squares(self._before)
        self._before, self._gradients = [], None
        table = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        table[self.tp.rank].index_copy_(0, self._rows, torch.stack(columns, dim=1))
        return table.flatten()

    def _squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a 1-D float64 tensor with one sum of squares for each parameter slice: the results of `_squares_of`
        for all parts of this rank (`_Part`), concatenated in order. `tensors` contains the elements of each part."""
        found = [torch.zeros(0, dtype=torch.float64, device=self.device)]
        for part, values in zip(self._parts, tensors, strict=True):
            found.append(_squares_of(part, values).to(self.device, non_blocking=True))
        return torch.cat(found)


def _squares_of(part: _Part, values: Tensor) -> Tensor:
    """Return a sum of squares for each parameter in `part.pieces`, as a 1-D float64 tensor on the device of `values`.
    `values` contains the elements of `part`."""
    if values.is_cuda:
        views = [values[start:stop] for _, start, stop in part.pieces]
        return torch.stack(foreach_norm(views, 2, torch.float64)).square()
    # Like `grad_norm.sum_of_squares`, but in one pass over all parameters of a bucket.
    dtype = torch.promote_types(values.dtype, torch.float32)
    squares = torch.linalg.vector_norm(values.view(-1, ALIGNMENT), dim=1, dtype=dtype).double().square_()
    return torch.stack([squares[start // ALIGNMENT : stop // ALIGNMENT].sum() for _, start, stop in part.pieces])


def _part(shard: Shard, state: ParallelState) -> _Part:
    bucket, first = shard.bucket, shard.bucket.owned_range[0]
    start, stop = (end - first for end in bucket.shard_range)
    pieces = bucket.layout.pieces(*bucket.shard_range) if bucket.copies.first else ()
    counted = tuple(_placed(piece, start + first) for piece in pieces if _counts(piece.meta, state))
    return _Part(shard, start, stop, counted)


def _placed(piece: Piece, first: int) -> tuple[str, int, int]:
    start = piece.offset - first
    numel = -(-(piece.stop - piece.start) // ALIGNMENT) * ALIGNMENT
    return piece.meta.name, start, start + numel


def _counts(meta: ParamMeta, state: ParallelState) -> bool:
    """Return True if this rank adds the squares of its replica of a parameter to its sums."""
    if meta.expert:
        return meta.is_first_replica(state.coords)
    return not meta.shared_stages or state.pp.rank == 0
