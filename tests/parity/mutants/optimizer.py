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
from tests.parity.mutants.common import mutant

STATES = {"world": "8", "tp": "2sp", "pp": "2", "states": "bf16", "groups": "own", "optimizer": "overlapped"}
CLIPPED = {"world": "4", "tp": "2", "cp": "2ring", "update": "clipped", "heads": "gqa"}


@mutant(matrix_exchange, "start_all_to_all", world="2", update="muon")
def _own_rows_only(x: Tensor, outgoing: list[int], incoming: list[int], axis: Axis) -> collectives.Pending:
    """A ZeRO shard orthogonalized by itself.

    In place of the exchange of matrices: of each one there is what this rank holds of it, and zeros."""
    result, sent, kept = x.new_zeros(sum(incoming)), sum(outgoing[: axis.rank]), sum(incoming[: axis.rank])
    result[kept : kept + incoming[axis.rank]] = x[sent : sent + outgoing[axis.rank]]
    return collectives.Pending(result)


@mutant(MatrixPlan, "_matrices_of", world="2", tp="2", update="muon")
def _shards_as_matrices(self: MatrixPlan, meta: ParamMeta, splits: Any, blockwise: bool) -> Any:
    """A tensor-parallel shard orthogonalized by itself."""
    return _true_matrices(self, meta, splits, True)


@mutant(matrix_exchange.MatrixExchange, "_stacked", world="2", update="muon")
def _next_matrix(self: Any, current: Any, received: Tensor) -> list[Tensor]:
    """The momentum of another matrix orthogonalized."""
    return [stack.roll(1, 0) for stack in _true_stacked(self, current, received)]


@mutant(muon.Muon, "__init__", world="2", update="muon")
def _without_nesterov(self: Any, config: Any, *args: Any) -> None:
    """Nesterov's look-ahead forgotten."""
    options = replace(config.options(MuonFlags), muon_nesterov=False)
    _true_muon(self, config.with_options(options), *args)


_true_matrices, _true_stacked = MatrixPlan._matrices_of, matrix_exchange.MatrixExchange._stacked

_true_muon = muon.Muon.__init__


@mutant(ParamGroup, "lr", **STATES)
def _lr_without_its_factor(self: ParamGroup, lr: float, decoupled_lr: float | None) -> float:
    """The factor of a group's learning rate is lost."""
    return lr


@mutant(precision_aware, "uniform_of", **STATES)
def _noise_by_place(key: Tensor, salt: int) -> Tensor:
    """States are rounded by their place in a shard."""
    return _true_uniform_of(torch.arange(len(key), dtype=torch.int32), salt)


_true_uniform_of = dropout.uniform_of


@mutant(qk_clip, "all_reduce_", **CLIPPED)
def _of_this_rank_alone(x: Tensor, axis: Axis, op: Any) -> Tensor:
    """The largest logits of a head are those of one context-parallel rank."""
    return x
