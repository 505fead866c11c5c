"""Mutants of experts and their router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core import collectives as mappings
from megatron.core.moe import dispatcher, experts, router
from megatron.core.moe import load_balancing as balance
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.core.transformer import (
    activations,
)
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants


def _bias_in_the_first_columns(y: Tensor, bias: Tensor, of_rows: Tensor, factors: Tensor | None, first: int) -> Tensor:
    return _true_with_bias(y, bias, of_rows, factors, 0)


def _bias_of_full_weight(y: Tensor, bias: Tensor, of_rows: Tensor, factors: Tensor | None, first: int) -> Tensor:
    return _true_with_bias(y, bias, of_rows, None, first)


_true_with_bias = experts._with_bias


def _router_not_summed(*args: Any) -> list[ParamMeta]:
    return [replace(meta, partial_over=()) for meta in _true_router_metas(*args)]


_true_router_metas = router.router_metas


def _no_gradient_of_input_weights(x: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _true_weighted_rows(x, weights, grad)[0], torch.zeros_like(weights)


_true_weighted_rows = experts._gradients_of_weighted_rows


def _keep_own_gradient(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    return mappings.local_slice(x, axis, dim)


def _rows_before_they_arrive(self: dispatcher.Exchange, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What is received is read while the all-to-all is under way."""
    started = [dispatcher.start_all_to_all(x, list(self.send), list(self.receive), self.axis) for x in tensors]
    early = [pending.result.clone() for pending in started]
    self.pair.hand_over()
    for pending in started:
        pending.wait()
    return early


def _sum_of_all_slots(y: Tensor, slots: Tensor, valid: Tensor | None, k: int) -> Tensor:
    """A token gets another one's row for each expert that dropped it."""
    index = slots if valid is None else torch.where(valid, slots, 0)
    return y.index_select(0, index).unflatten(0, (-1, k)).sum(1)


def _bias_by_local_places(logits: Tensor, places: Tensor, sequence: Axis) -> Tensor:
    return _true_sinkhorn_bias(logits, places, Axis())


def _bits_of_local_places(key: Any, sample: Tensor, places: Tensor, n: int) -> Tensor:
    return _true_random_bits(key, sample, places % 8, n)


_true_sinkhorn_bias, _true_random_bits = router.sinkhorn_bias, router.random_bits


MUTANTS: Mutants = {
    "sinkhorn over a part of the sequence": (
        [(router, "sinkhorn_bias", _bias_by_local_places)],
        Combination.of(world="2", cp="2ring", mlp="moe", balancing="sinkhorn"),
    ),
    "forced choices by places in a part of the sequence": (
        [(router, "random_bits", _bits_of_local_places)],
        Combination.of(world="4", tp="2sp", etp="1", mlp="moe", balancing="forced"),
    ),
    "auxiliary loss of the global batch from the loads of one rank": (
        [(balance, "start_all_reduce_", lambda x, axis: mappings.Pending(x))],
        Combination.of(world="2", mlp="moe", balancing="batch"),
    ),
    "experts' sums over expert tensor ranks dropped": (
        [(dispatcher, "reduce_scatter", _keep_own_gradient)],
        Combination.of(world="2", tp="2sp", mlp="moe"),
    ),
    "experts' rows read before they have arrived": (
        [(dispatcher.Exchange, "_run", _rows_before_they_arrive)],
        Combination.of(world="4", pp="2", ep="2", mlp="moe", schedule="interleaved2", expert_messages="in turns"),
    ),
    "bias of an expert's output in the columns of another rank": (
        [(experts, "_with_bias", _bias_in_the_first_columns)],
        Combination.of(world="2", tp="2sp", mlp="biased"),
    ),
    "bias of an expert's output without the expert's weight": (
        [(experts, "_with_bias", _bias_of_full_weight)],
        Combination.of(mlp="biased"),
    ),
    "gradients of gates beyond their bound": (
        [(activations, "_within", lambda x, clamp: torch.ones_like(x))],
        Combination.of(mlp="biased"),
    ),
    "gradients of the router not summed over the parts of the sequence": (
        [(router, "router_metas", _router_not_summed)],
        Combination.of(world="2", tp="2sp", mlp="biased"),
    ),
    "no gradient of the weights of experts' inputs": (
        [(experts, "_gradients_of_weighted_rows", _no_gradient_of_input_weights)],
        Combination.of(mlp="moe", routing="weighted inputs"),
    ),
    "padding of experts' messages summed": (
        [(dispatcher, "sum_of_slots", _sum_of_all_slots)],
        Combination.of(world="2", ep="2", mlp="drops", expert_messages="padded"),
    ),
    "auxiliary loss from the local part of the sequence": (
        [(balance, "all_reduce_", lambda x, axis: x)],
        Combination.of(world="2", cp="2ring", mlp="moe"),
    ),
}
