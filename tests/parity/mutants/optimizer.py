"""Mutants of optimizers, their groups and states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core import collectives, dropout
from megatron.core.config.param_groups import ParamGroup
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.extensions.optimizers import matrix_exchange, muon, precision_aware, qk_clip
from megatron.extensions.optimizers.flags import MuonFlags
from megatron.extensions.optimizers.matrix_plan import MatrixPlan
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants


def _own_rows_only(x: Tensor, outgoing: list[int], incoming: list[int], axis: Axis) -> collectives.Pending:
    """In place of the exchange of matrices: of each one there is what this rank holds of it, and zeros."""
    result, sent, kept = x.new_zeros(sum(incoming)), sum(outgoing[: axis.rank]), sum(incoming[: axis.rank])
    result[kept : kept + incoming[axis.rank]] = x[sent : sent + outgoing[axis.rank]]
    return collectives.Pending(result)


def _shards_as_matrices(self: MatrixPlan, meta: ParamMeta, splits: Any, blockwise: bool) -> Any:
    return _true_matrices(self, meta, splits, True)


def _next_matrix(self: Any, current: Any, received: Tensor) -> list[Tensor]:
    return [stack.roll(1, 0) for stack in _true_stacked(self, current, received)]


def _without_nesterov(self: Any, config: Any, *args: Any) -> None:
    options = replace(config.options(MuonFlags), muon_nesterov=False)
    _true_muon(self, config.with_options(options), *args)


_true_matrices, _true_stacked = MatrixPlan._matrices_of, matrix_exchange.MatrixExchange._stacked

_true_muon = muon.Muon.__init__


def _lr_without_its_factor(self: ParamGroup, lr: float, decoupled_lr: float | None) -> float:
    return lr


def _noise_by_place(key: Tensor, salt: int) -> Tensor:
    return _true_uniform_of(torch.arange(len(key), dtype=torch.int32), salt)


_true_uniform_of = dropout.uniform_of


def _of_this_rank_alone(x: Tensor, axis: Axis, op: Any) -> Tensor:
    return x


STATES = Combination.of(world="8", tp="2sp", pp="2", states="bf16", groups="own", optimizer="overlapped")

CLIPPED = Combination.of(world="4", tp="2", cp="2ring", update="clipped", heads="gqa")


MUTANTS: Mutants = {
    "the factor of a group's learning rate is lost": ([(ParamGroup, "lr", _lr_without_its_factor)], STATES),
    "states are rounded by their place in a shard": ([(precision_aware, "uniform_of", _noise_by_place)], STATES),
    "the largest logits of a head are those of one context-parallel rank": (
        [(qk_clip, "all_reduce_", _of_this_rank_alone)],
        CLIPPED,
    ),
    "a ZeRO shard orthogonalized by itself": (
        [(matrix_exchange, "start_all_to_all", _own_rows_only)],
        Combination.of(world="2", update="muon"),
    ),
    "a tensor-parallel shard orthogonalized by itself": (
        [(MatrixPlan, "_matrices_of", _shards_as_matrices)],
        Combination.of(world="2", tp="2", update="muon"),
    ),
    "the momentum of another matrix orthogonalized": (
        [(matrix_exchange.MatrixExchange, "_stacked", _next_matrix)],
        Combination.of(world="2", update="muon"),
    ),
    "Nesterov's look-ahead forgotten": (
        [(muon.Muon, "__init__", _without_nesterov)],
        Combination.of(world="2", update="muon"),
    ),
}
