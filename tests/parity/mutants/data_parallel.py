"""Mutants of data parallelism, sharding strategies and the count of tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core import collectives
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.distributed import grad_readiness as overlap
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.param_and_grad_buffer import UnitBucket
from megatron.core.optimizer import distrib_optimizer
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.param_meta import ParamMeta
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants, nothing


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


def _updated_twice(*args: Any) -> list[Any]:
    rules = _true_rules(*args)
    return [*rules, rules[-1]]


_true_rules = distrib_optimizer._build_rules

_true_open_grads, _true_finish_grad_sync = UnitBucket.open_grads, UnitBucket.finish_grad_sync


def _local_token_count(num_tokens: Tensor, state: ParallelState, loss_rank: int = -1) -> Tensor:
    return num_tokens.double() * state.dp.size * state.cp.size * (1 + 0.5 * (state.dp_cp.size > 1))


def _token_count_over_tp_too(num_tokens: Tensor, state: ParallelState, loss_rank: int = -1) -> Tensor:
    return _true_count(num_tokens, state, loss_rank) * state.tp.size


_true_count = finalize.global_token_count


def _count_all(meta: ParamMeta, coords: Any) -> bool:
    return True


def _report_early(self: Any, microbatches: int) -> None:
    """Waits for one micro-batch less: the reduction starts before the last gradient is in."""
    _true_begin_step(self, microbatches - (self.per_microbatch is not None and microbatches > 1))


_true_begin_step = overlap.GradReadiness.begin_step


MUTANTS: Mutants = {
    "data-parallel reduction dropped": (
        [(param_and_grad_buffer.Bucket, "start_grad_sync", nothing)],
        [Combination.of(world="2"), Combination.of(world="2", optimizer="replicated")],
    ),
    "stale parameters: the gather after the update dropped": (
        [(param_and_grad_buffer.Bucket, "start_param_sync", nothing)],
        [Combination.of(world="2"), Combination.of(world="2", optimizer="overlapped")],
    ),
    "overlapped reduction starts a micro-batch early": (
        [(overlap.GradReadiness, "begin_step", _report_early)],
        [Combination.of(world="2", optimizer="overlapped")],
    ),
    "loss scaled by a count of the wrong group (data)": (
        [("step", "global_token_count", _local_token_count)],
        [Combination.of(world="2"), Combination.of(world="2", cp="2ring")],
    ),
    "loss scaled by a count of the wrong group (tensor)": (
        [("step", "global_token_count", _token_count_over_tp_too)],
        [Combination.of(world="2", tp="2")],
    ),
    "gradient norm counts every replica": (
        [(ParamMeta, "is_first_replica", _count_all)],
        [Combination.of(world="2", tp="2"), Combination.of(world="2", pp="2")],
    ),
    "parameters that are gathered before an update read after it": (
        [(UnitBucket, "drop_params", lambda self: None)],
        [
            Combination.of(world="2", optimizer="parameters"),
            Combination.of(world="4", pp="2", schedule="zb-h1", optimizer="parameters"),
        ],
    ),
    "a gather of other ranks' shards left out": (
        [(param_and_grad_buffer, "start_all_gather", _own_shard_alone)],
        [Combination.of(world="2", optimizer="parameters", style="llama")],
    ),
    "gradients of a unit dropped before all of them have been reduced": (
        [(UnitBucket, "open_grads", _opened_empty)],
        [
            Combination.of(world="2", optimizer="gradients"),
            Combination.of(world="4", ep="2", mlp="moe", optimizer="parameters"),
        ],
    ),
    "gradients not added up over instances": (
        [(param_and_grad_buffer.ParamAndGradBuffer, "start_copies_sync", lambda self: [])],
        [
            Combination.of(world="4", optimizer="parameters", instances="2"),
            Combination.of(world="2", instances="2"),
        ],
    ),
    "a shard of gradients added twice": (
        [(UnitBucket, "finish_grad_sync", _added_twice)],
        [Combination.of(world="2", optimizer="parameters"), Combination.of(world="2", optimizer="gradients")],
    ),
    "a shard updated twice": (
        [(distrib_optimizer, "_build_rules", _updated_twice)],
        [
            Combination.of(world="2", optimizer="parameters"),
            Combination.of(world="4", optimizer="gradients", instances="2"),
            Combination.of(world="2", optimizer="parameters", update="muon"),
        ],
    ),
    "only the last micro-batch in a shard of gradients": (
        [(UnitBucket, "finish_grad_sync", _replaced)],
        [Combination.of(world="4", pp="2", schedule="zb-v", optimizer="gradients")],
    ),
}
