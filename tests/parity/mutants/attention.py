"""Mutants of attention, over a sequence and over its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core import collectives as mappings
from megatron.core.attention import context_parallel, core_attention, tile_kernels
from megatron.core.attention.core_attention import alibi_slopes
from megatron.core.attention.tiles import Documents, Tile, cut_documents
from megatron.core.attention.varlen import add_sinks_
from megatron.core.config.layers import Rotation
from megatron.core.config.model import TransformerConfig
from megatron.core.parallel_state import Axis
from megatron.core.transformer import (
    block,
    norm,
    rotary,
    self_attention,
)
from megatron.extensions.context_parallel import attention as gathered
from tests.parity.mutants.common import mutant, plant


def _first_sinks(self: core_attention.CoreAttention) -> Tensor:
    sinks = self.softmax_offset
    assert sinks is not None
    return sinks[: len(sinks) // self.cp.size]


@mutant(context_parallel, "_merge_", world="2", cp="2ring", softmax="off by one")
def _merge_with_a_sink(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    """Each part of a row has the sink."""
    part, part_lse = part.clone(), part_lse.clone()
    add_sinks_(part, part_lse, torch.zeros(part.shape[2], dtype=part.dtype))
    _true_merge_(out, lse, part, part_lse, first)


_true_merge_ = context_parallel._merge_


@mutant(tile_kernels.TorchKernel, "_backward", world="2", softmax="off by one")
def _backward_without_a_cap(self: Any, rows: Any, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Any:
    """Slope of a cap of scores forgotten."""
    shown = tile_kernels.TorchKernel(self.scale, self.dropout, self.slopes)
    shown._scores = self._scores  # type: ignore[method-assign]
    return _true_tile_backward(shown, rows, q, k, v, tile)


@mutant(self_attention, "head_wise_gated_output", world="2", tp="2", block="parallel")
def _gated_without_gradient(x: Tensor, gate: Tensor, function: str) -> Tensor:
    """Gates of heads get no gradient."""
    return _true_head_gate(x, gate.detach(), function)


_true_head_gate = self_attention.head_wise_gated_output


@mutant(rotary, "rotary_frequencies", world="2", pp="2", style="llama", layers="own heads")
def _frequencies_of_other_layers(config: TransformerConfig, rotation: Rotation) -> Tensor:
    """Layers with windows rotated as other layers."""
    return _true_frequencies(config, config.rotation)


_true_frequencies = rotary.rotary_frequencies

_true_tile_backward = tile_kernels.TorchKernel._backward


@mutant(block, "query_scales", world="2", cp="2ring", style="gptj", layers="tempered")
def _scales_of_rows(config: TransformerConfig, positions: Tensor) -> Tensor:
    """Temperature by a rank's rows, not by positions."""
    return _true_query_scales(config, torch.arange(positions.shape[-1]))


_true_query_scales = block.query_scales


class _SlopesOfTheFirstRank(list[float]):
    """In place of the slopes of all heads: any part of them is the first one."""

    def __getitem__(self, part: Any) -> Any:
        return list(self)[: part.stop - part.start]


@mutant(tile_kernels, "distances", world="2", cp="2ring", style="bloom")
def _distances_of_rows(tile: Tile, device: torch.device) -> Tensor:
    """ALiBi distances of a rank's rows, not of positions."""
    return torch.arange(len(tile.queries), device=device)[:, None] - torch.arange(len(tile.keys), device=device)


@mutant(core_attention, "cut_documents", world="2", cp="2gather", layers="chunks")
def _chunks_of_own_rows(documents: Documents | None, samples: int, length: int, longest: int) -> Documents:
    """Chunks of a rank's rows, not of the sequence.

    Of two context-parallel ranks: as many chunks as a rank's rows have, not as the sequence has."""
    return cut_documents(documents, samples, length // 2, longest)


def _exchange_of_zeros(real: type) -> Callable[..., Any]:
    """Gradients of keys and values that are on their way around the ring arrive as zeros."""

    def exchange(x: Tensor, cp: Axis, tag: int) -> Any:
        return real(torch.zeros_like(x) if tag == 1 else x, cp, tag)

    return exchange


@mutant(context_parallel, "_merge_", world="2", cp="2ring", style="llama")
def _merge_without_weights(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    """Ring attention adds parts without their weights."""
    if first:
        out.copy_(part)
    else:
        out.add_(part)
    lse.copy_(part_lse)


plant(
    "Ring attention loses gradients of keys and values",
    (context_parallel, "RingExchange", _exchange_of_zeros(context_parallel.RingExchange)),
    world="2",
    cp="2ring",
)
plant(
    "Gathered keys get only their own rank's gradient",
    (gathered, "all_gather_sequence", lambda x, axis: mappings.gather_from(x, axis, dim=0)),
    world="2",
    cp="2gather",
)
plant(
    "Sinks of the first heads, not of this rank's",
    (core_attention.CoreAttention, "_sinks", property(_first_sinks)),
    world="2",
    cp="2ulysses",
    softmax="sinks",
)
plant(
    "Sinks get no gradient",
    (context_parallel, "sinks_grad", lambda grad, out, lse, sinks: torch.zeros_like(sinks)),
    world="2",
    tp="2",
    softmax="sinks",
)
plant(
    "ALiBi slopes of the first rank's heads",
    (core_attention, "alibi_slopes", lambda heads: _SlopesOfTheFirstRank(alibi_slopes(heads))),
    world="2",
    tp="2",
    style="bloom",
)
plant(
    "Kinds of layers by place in the stage, not by number",
    (TransformerConfig, "layer", lambda self, number: self.layers[number % 3]),
    world="2",
    pp="2",
    style="llama",
    layers="bases",
)
plant(
    "Norms of queries and keys without weights skipped",
    (norm, "_divided_by_root_mean_square", lambda x, eps: x),
    style="gptj",
    layers="tempered",
)
