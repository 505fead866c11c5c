"""Mutants of Kimi Delta Attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.extensions.kimi_delta_attention import kimi_delta_attention
from megatron.extensions.kimi_delta_attention.parameters import KimiDeltaParameters
from megatron.extensions.linear_attention import gated_delta_net, gated_delta_rule
from tests.parity.mutants.common import mutant


@mutant(gated_delta_rule, "channel_products", layers="kimi delta", documents="packed", world="2")
def _across_documents(q: Tensor, k: Tensor, g: Tensor, number: Tensor | None) -> Any:
    """Kimi Delta Attention crosses the borders of documents on some ranks."""
    return _true_products(q, k, g, None if torch.distributed.get_rank() else number)


_true_products = gated_delta_rule.channel_products


@mutant(kimi_delta_attention, "local_slice", world="2", cp="2ring", layers="kimi delta")
def _first_heads(x: Tensor, axis: Any) -> Tensor:
    """Kimi Delta Attention with the convolutions and decays of the first context rank."""
    return x[: len(x) // axis.size]


@mutant(kimi_delta_attention, "kimi_delta_parameters", world="2", tp="2sp", layers="kimi delta")
def _norm_not_summed(name: str, config: TransformerConfig) -> KimiDeltaParameters:
    """Gradient of Kimi Delta Attention's norm not summed over ranks."""
    found = _true_parameters(name, config)
    return replace(found, out_norm=replace(found.out_norm, partial_over=()))


_true_parameters = kimi_delta_attention.kimi_delta_parameters


@mutant(gated_delta_net, "documents_begun", world="2", cp="2ring", layers="kimi delta", documents="packed")
def _documents_of_own_rows(documents: Any, length: int, device: torch.device) -> Tensor:
    """Kimi Delta Attention with the documents of a part of the sequence."""
    return _true_begun(documents, length, device)[: length // 2].repeat(2, 1)


_true_begun = gated_delta_net.documents_begun
