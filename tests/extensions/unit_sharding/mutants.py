"""Mutants of sharded gradients and parameters."""

from __future__ import annotations

from torch import Tensor

from megatron.core import collectives
from megatron.core.parallel_state import Axis
from megatron.extensions.unit_sharding import unit_sharding
from megatron.extensions.unit_sharding.unit_sharding import UnitBucket
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants


def _own_shard_alone(x: Tensor, axis: Axis, out: Tensor) -> collectives.Pending:
    return collectives.Pending(out.zero_().chunk(axis.size)[axis.rank].copy_(x))


def _opened_empty(self: UnitBucket) -> None:
    self.drop_grads()
    _true_open_grads(self)


def _added_twice(self: UnitBucket) -> None:
    if self._reduced is not None:
        self.grad_shard.add_(self._reduced.wait())
    _true_finish_grad_sync(self)


def _replaced(self: UnitBucket) -> None:
    if self._reduced is not None:
        self.grad_shard.zero_()
    _true_finish_grad_sync(self)


_true_open_grads, _true_finish_grad_sync = UnitBucket.open_grads, UnitBucket.finish_grad_sync


MUTANTS: Mutants = {
    "parameters that are gathered before an update read after it": (
        [(UnitBucket, "drop_params", lambda self: None)],
        Combination.of(world="2", optimizer="parameters"),
    ),
    "a gather of other ranks' shards left out": (
        [(unit_sharding, "start_all_gather", _own_shard_alone)],
        Combination.of(world="2", optimizer="parameters", style="llama"),
    ),
    "gradients of a unit dropped before all of them have been reduced": (
        [(UnitBucket, "open_grads", _opened_empty)],
        Combination.of(world="2", optimizer="gradients"),
    ),
    "a shard of gradients added twice": (
        [(UnitBucket, "finish_grad_sync", _added_twice)],
        Combination.of(world="2", optimizer="parameters"),
    ),
    "only the last micro-batch in a shard of gradients": (
        [(UnitBucket, "finish_grad_sync", _replaced)],
        Combination.of(world="4", pp="2", schedule="zb-v", optimizer="gradients"),
    ),
}
