"""Mutants of data parallelism, sharding strategies and the count of tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.distributed import grad_readiness as overlap
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta
from tests.parity.mutants.common import mutant, nothing, plant


@mutant(distrib_optimizer, "_build_rules", world="2", optimizer="parameters")
def _updated_twice(*args: Any) -> list[Any]:
    """A shard updated twice."""
    rules = _true_rules(*args)
    return [*rules, rules[-1]]


_true_rules = distrib_optimizer._build_rules


@mutant("step", "global_token_count", world="2")
def _local_token_count(num_tokens: Tensor, state: ParallelState, loss_rank: int = -1) -> Tensor:
    """Loss scaled by a count of the wrong group (data)."""
    return num_tokens.double() * state.dp.size * state.cp.size * (1 + 0.5 * (state.dp_cp.size > 1))


@mutant("step", "global_token_count", world="2", tp="2")
def _token_count_over_tp_too(num_tokens: Tensor, state: ParallelState, loss_rank: int = -1) -> Tensor:
    """Loss scaled by a count of the wrong group (tensor)."""
    return _true_count(num_tokens, state, loss_rank) * state.tp.size


_true_count = finalize.global_token_count


@mutant(ParamMeta, "is_first_replica", world="2", tp="2")
def _count_all(meta: ParamMeta, coords: Any) -> bool:
    """Gradient norm counts every replica."""
    return True


@mutant(overlap.GradReadiness, "begin_step", world="2", optimizer="overlapped")
def _report_early(self: Any, microbatches: int) -> None:
    """Overlapped reduction starts a micro-batch early.

    Waits for one micro-batch less: the reduction starts before the last gradient is in."""
    _true_begin_step(self, microbatches - (self.per_microbatch is not None and microbatches > 1))


_true_begin_step = overlap.GradReadiness.begin_step


plant("Data-parallel reduction dropped", (param_and_grad_buffer.Bucket, "start_grad_sync", nothing), world="2")
plant(
    "Stale parameters: the gather after the update dropped",
    (param_and_grad_buffer.Bucket, "start_param_sync", nothing),
    world="2",
)
plant(
    "Gradients not added up over instances",
    (param_and_grad_buffer.ParamAndGradBuffer, "start_copies_sync", lambda self: []),
    world="4",
    optimizer="parameters",
    instances="2",
)
