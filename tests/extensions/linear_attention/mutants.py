"""Mutants of gated delta nets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.batch import BatchContext
from megatron.core.collectives import swap_blocks
from megatron.core.config.model import TransformerConfig
from megatron.core.parallel_state import Axis
from megatron.core.transformer import layer
from megatron.extensions.linear_attention import gated_delta_net
from megatron.extensions.linear_attention.parameters import DeltaNetParameters
from tests.parity.mutants.common import mutant, plant


@mutant(gated_delta_net, "gated_delta_chunks", layers="delta nets")
def _without_decay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, number: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Decay of gated delta nets ignored."""
    return _true_chunks(q, k, v, g * 0, beta, number)


@mutant(gated_delta_net, "gated_delta_chunks", layers="delta nets")
def _without_states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, number: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """States of gated delta nets not passed from chunk to chunk.

    In place of the gated delta rule: each chunk of 4 tokens begins with an empty state."""
    outs, states = zip(
        *(_true_chunks(*part) for part in zip(*(x.split(4) for x in (q, k, v, g, beta)), strict=True)), strict=True
    )
    return torch.cat(outs), states[-1]


_true_chunks = gated_delta_net.gated_delta_chunks


@mutant(gated_delta_net, "delta_net_parameters", world="2", tp="2", layers="delta nets")
def _delta_net_norm_not_summed(name: str, config: TransformerConfig) -> DeltaNetParameters:
    """Gradient of a gated delta net's norm not summed over ranks."""
    found = _true_delta_net(name, config)
    return replace(found, out_norm=replace(found.out_norm, partial_over=()))


_true_delta_net = gated_delta_net.delta_net_parameters


@mutant(gated_delta_net, "local_slice", world="2", cp="2ring", layers="delta nets")
def _first_heads(x: Tensor, axis: Axis) -> Tensor:
    """Gated delta nets with the convolutions and decays of the first context rank."""
    return x[: len(x) // axis.size]


@mutant(gated_delta_net, "documents_begun", world="2", cp="2ring", layers="delta nets", documents="packed")
def _documents_of_own_rows(context: BatchContext, length: int, device: torch.device) -> Tensor | None:
    """Gated delta nets with the documents of a part of the sequence.

    As if the documents of whole samples were cut as far as this rank's rows go, time and again."""
    found = _true_begun(context, length, device)
    return found if context.places is None or found is None else found[: len(context.places)].repeat(2, 1)


_true_begun = gated_delta_net.documents_begun


plant(
    "Gated delta nets read a sequence in order of ranks",
    (gated_delta_net, "sequence_to_heads", lambda x, cp: swap_blocks(x.movedim(2, 0), cp).flatten(0, 1)),
    (gated_delta_net, "heads_to_sequence", lambda x, cp: swap_blocks(x.unflatten(0, (cp.size, -1)), cp).movedim(0, 2)),
    world="2",
    cp="2gather",
    layers="delta nets",
)


@mutant(layer.TransformerLayer, "forward", world="2", pp="2", layers="sublayers")
def _without_the_stream(self: layer.TransformerLayer, x: Tensor, context: BatchContext) -> Tensor:
    """Layers without an MLP do not add to the residual stream."""
    return _true_forward(self, x, context) - (0 if self.has_mlp else x)


_true_forward = layer.TransformerLayer.forward
