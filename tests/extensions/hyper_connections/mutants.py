"""Mutants of hyper-connections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.param_meta import ParamMeta
from megatron.extensions.hyper_connections import hyper_connection, mixing
from tests.parity.mutants.common import mutant


@mutant(hyper_connection, "connection_metas", world="2", tp="2sp", block="streams")
def _connections_not_summed(*args: Any) -> list[ParamMeta]:
    """Gradients of hyper-connections not summed under sequence parallelism."""
    return [replace(meta, partial_over=()) for meta in _true_connections(*args)]


_true_connections = hyper_connection.connection_metas


@mutant(hyper_connection, "contract_metas", world="2", tp="2sp", block="streams")
def _contraction_not_summed(*args: Any) -> list[ParamMeta]:
    """Gradients of the streams' contraction not summed under sequence parallelism."""
    return [replace(meta, partial_over=()) for meta in _true_contraction(*args)]


_true_contraction = hyper_connection.contract_metas


@mutant(GPTModel, "hidden_states", world="2", pp="2", block="streams")
def _one_stream_of_a_message(self: Any, hidden: Tensor | None, *more: Any) -> Tensor:
    """A stage continues with the first stream of a message."""
    if hidden is not None:
        h = self.config.hidden_size
        hidden = hidden[..., :h].repeat(1, 1, hidden.shape[-1] // h)
    return _true_states(self, hidden, *more)


_true_states = GPTModel.hidden_states


@mutant(hyper_connection.HyperConnection, "enter", world="2", pp="2", block="mean of streams", multi_token="1")
def _divided_streams(x: Tensor, config: TransformerConfig) -> Tensor:
    """Streams begin as equal shares of hidden states."""
    n = config.residual_size // config.hidden_size
    return (x / n).repeat(1, 1, n)


@mutant(hyper_connection.PendingMix, "made", world="1", recompute="streams", block="streams")
def _made_again_without_output(self: Any, parts: mixing.Mix) -> Tensor:
    """Streams made again for the backward lack the output of the sublayer before."""
    return _true_made(self, parts._replace(y=parts.y * 0) if not torch.is_grad_enabled() else parts)


_true_made = hyper_connection.PendingMix.made


@mutant(mixing, "mixed_gradients", world="2", tp="2", block="streams")
def _transposed_gradient(*operands: Tensor) -> tuple[Tensor, ...]:
    """Gradient of the mixing matrix transposed."""
    dx, dpost, dres, dy = _true_gradients(*operands)
    return dx, dpost, dres.transpose(-1, -2), dy


_true_gradients = mixing.mixed_gradients
