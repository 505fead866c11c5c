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
from tests.parity.mutants.common import mutant, plant


@mutant(experts, "_with_bias", world="2", tp="2sp", mlp="biased")
def _bias_in_the_first_columns(y: Tensor, bias: Tensor, of_rows: Tensor, factors: Tensor | None, first: int) -> Tensor:
    """Bias of an expert's output in the columns of another rank."""
    return _true_with_bias(y, bias, of_rows, factors, 0)


@mutant(experts, "_with_bias", mlp="biased")
def _bias_of_full_weight(y: Tensor, bias: Tensor, of_rows: Tensor, factors: Tensor | None, first: int) -> Tensor:
    """Bias of an expert's output without the expert's weight."""
    return _true_with_bias(y, bias, of_rows, None, first)


_true_with_bias = experts._with_bias


@mutant(router, "router_metas", world="2", tp="2sp", mlp="biased")
def _router_not_summed(*args: Any) -> list[ParamMeta]:
    """Gradients of the router not summed over the parts of the sequence."""
    return [replace(meta, partial_over=()) for meta in _true_router_metas(*args)]


_true_router_metas = router.router_metas


@mutant(experts, "_weighted_backward", mlp="moe", routing="weighted inputs")
def _no_gradient_of_input_weights(x: Tensor, weights: Tensor, grad: Tensor, kind: Any) -> tuple[Tensor, Tensor]:
    """No gradient of the weights of experts' inputs."""
    dx, of_weights = _true_weighted_backward(x, weights, grad, kind)
    return dx, torch.zeros_like(of_weights) if kind == "identity" else of_weights


_true_weighted_backward = experts._weighted_backward


@mutant(dispatcher, "reduce_scatter", world="2", tp="2sp", mlp="moe")
def _keep_own_gradient(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Experts' sums over expert tensor ranks dropped."""
    return mappings.local_slice(x, axis, dim)


@mutant(
    dispatcher.Exchange,
    "_run",
    world="4",
    pp="2",
    ep="2",
    mlp="moe",
    schedule="interleaved2",
    expert_messages="in turns",
)
def _rows_before_they_arrive(self: dispatcher.Exchange, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Experts' rows read before they have arrived.

    What is received is read while the all-to-all is under way."""
    started = [dispatcher.start_all_to_all(x, list(self.send), list(self.receive), self.axis) for x in tensors]
    early = [pending.result.clone() for pending in started]
    self.pair.hand_over()
    for pending in started:
        pending.wait()
    return early


@mutant(dispatcher, "sum_of_slots", world="2", ep="2", mlp="drops", expert_messages="padded")
def _sum_of_all_slots(y: Tensor, slots: Tensor, valid: Tensor | None, k: int) -> Tensor:
    """Padding of experts' messages summed.

    A token gets another one's row for each expert that dropped it."""
    index = slots if valid is None else torch.where(valid, slots, 0)
    return y.index_select(0, index).unflatten(0, (-1, k)).sum(1)


plant(
    "Auxiliary loss of the global batch from the loads of one rank",
    (balance, "start_all_reduce_", lambda x, axis: mappings.Pending(x)),
    world="2",
    mlp="moe",
    balancing="batch",
)
plant(
    "Gradients of gates beyond their bound", (activations, "_within", lambda x, clamp: torch.ones_like(x)), mlp="biased"
)
plant(
    "Auxiliary loss from the local part of the sequence",
    (balance, "all_reduce_", lambda x, axis: x),
    world="2",
    cp="2ring",
    mlp="moe",
)
