"""Mutants of lightning attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.tiles import Documents
from megatron.core.collectives import swap_blocks
from megatron.core.config.model import TransformerConfig
from megatron.core.transformer import norm
from megatron.extensions.lightning_attention import lightning_attention
from tests.parity.mutants.common import mutant, plant


@mutant(lightning_attention, "decay_rates", layers="lightning", world="2", tp="2")
def _of_first_heads(heads: range, layer: int, config: TransformerConfig, *where: Any) -> Tensor:
    """Heads of lightning attention decay as those of the first rank do."""
    return _true_rates(range(len(heads)), layer, config, *where)


@mutant(lightning_attention, "decay_rates", layers="lightning", world="2", pp="2")
def _of_first_layer(heads: range, layer: int, config: TransformerConfig, *where: Any) -> Tensor:
    """Layers of lightning attention decay as those of the first stage do."""
    return _true_rates(heads, layer % (config.num_layers // 2), config, *where)


_true_rates = lightning_attention.decay_rates


@mutant(lightning_attention, "documents_begun", world="2", cp="2ring", layers="lightning", documents="packed")
def _documents_of_own_rows(documents: Documents, length: int, device: torch.device) -> Tensor:
    """Lightning attention with the documents of a part of the sequence."""
    return _true_begun(documents, length, device)[: length // 2].repeat(2, 1)


_true_begun = lightning_attention.documents_begun


plant(
    "Lightning attention reads a sequence in order of ranks",
    (lightning_attention, "sequence_to_heads", lambda x, cp: swap_blocks(x.movedim(2, 0), cp).flatten(0, 1)),
    (
        lightning_attention,
        "heads_to_sequence",
        lambda x, cp: swap_blocks(x.unflatten(0, (cp.size, -1)), cp).movedim(0, 2),
    ),
    world="2",
    cp="2gather",
    layers="lightning",
)
plant(
    "Norm of lightning attention over the heads of a rank",
    (norm, "reduce_from", lambda x, axis: x),
    world="2",
    tp="2",
    layers="lightning",
)
