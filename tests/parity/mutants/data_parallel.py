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
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants, nothing


def _updated_twice(*args: Any) -> list[Any]:
    rules = _true_rules(*args)
    return [*rules, rules[-1]]


_true_rules = distrib_optimizer._build_rules


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
        Combination.of(world="2"),
    ),
    "stale parameters: the gather after the update dropped": (
        [(param_and_grad_buffer.Bucket, "start_param_sync", nothing)],
        Combination.of(world="2"),
    ),
    "overlapped reduction starts a micro-batch early": (
        [(overlap.GradReadiness, "begin_step", _report_early)],
        Combination.of(world="2", optimizer="overlapped"),
    ),
    "loss scaled by a count of the wrong group (data)": (
        [("step", "global_token_count", _local_token_count)],
        Combination.of(world="2"),
    ),
    "loss scaled by a count of the wrong group (tensor)": (
        [("step", "global_token_count", _token_count_over_tp_too)],
        Combination.of(world="2", tp="2"),
    ),
    "gradient norm counts every replica": (
        [(ParamMeta, "is_first_replica", _count_all)],
        Combination.of(world="2", tp="2"),
    ),
    "gradients not added up over instances": (
        [(param_and_grad_buffer.ParamAndGradBuffer, "start_copies_sync", lambda self: [])],
        Combination.of(world="4", optimizer="parameters", instances="2"),
    ),
    "a shard updated twice": (
        [(distrib_optimizer, "_build_rules", _updated_twice)],
        Combination.of(world="2", optimizer="parameters"),
    ),
}
