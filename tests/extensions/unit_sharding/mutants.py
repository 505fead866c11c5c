"""Mutants of sharded gradients and parameters."""

from __future__ import annotations

from torch import Tensor

from megatron.core import collectives
from megatron.core.parallel_state import Axis
from megatron.extensions.unit_sharding import unit_sharding
from megatron.extensions.unit_sharding.unit_sharding import UnitBucket
from tests.parity.mutants.common import mutant, plant


@mutant(unit_sharding, "start_all_gather", world="2", optimizer="parameters", style="llama")
def _own_shard_alone(x: Tensor, axis: Axis, out: Tensor) -> collectives.Pending:
    """A gather of other ranks' shards left out."""
    return collectives.Pending(out.zero_().chunk(axis.size)[axis.rank].copy_(x))


@mutant(UnitBucket, "open_grads", world="2", optimizer="gradients")
def _opened_empty(self: UnitBucket) -> None:
    """Gradients of a unit dropped before all of them have been reduced."""
    self.drop_grads()
    _true_open_grads(self)


@mutant(UnitBucket, "finish_grad_sync", world="2", optimizer="parameters")
def _added_twice(self: UnitBucket) -> None:
    """A shard of gradients added twice."""
    if self._reduced is not None:
        self.grad_shard.add_(self._reduced.wait())
    _true_finish_grad_sync(self)


@mutant(UnitBucket, "finish_grad_sync", world="4", pp="2", schedule="zb-v", optimizer="gradients")
def _replaced(self: UnitBucket) -> None:
    """Only the last micro-batch in a shard of gradients."""
    if self._reduced is not None:
        self.grad_shard.zero_()
    _true_finish_grad_sync(self)


_true_open_grads, _true_finish_grad_sync = UnitBucket.open_grads, UnitBucket.finish_grad_sync


plant(
    "Parameters that are gathered before an update read after it",
    (UnitBucket, "drop_params", lambda self: None),
    world="2",
    optimizer="parameters",
)
