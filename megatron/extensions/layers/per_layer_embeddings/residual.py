"""Residual stream [s, b, 2h + e] of models with per-layer embeddings.

The stream carries the hidden states (h channels), the word embeddings (h channels) and the weight of a norm (e
channels), because every layer needs all three. Each layer projects the word embeddings to e channels, normalizes the
projection with the norm weight, and adds the result to embeddings from the layer's table. All layers share one norm
weight. The norm weight is a parameter of layer 0. Layer 0 copies the weight to each token of the stream, and the other
layers read the weight from the stream. In the backward pass, the gradient of the weight flows through the stream to
layer 0. Pipeline stages therefore exchange no additional messages for the weight. The channels of the embedding tables
and projections are sharded over the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.collectives import copy_to, reduce_from
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.embedding import EmbeddingFunction, rounded
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.layers import LOCAL, TPContext, column_parallel, make_parameter, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear, sequence_partial
from megatron.core.transformer.norm import build_norm
from megatron.extensions.layers.per_layer_embeddings.flags import GATES, size_of


class PerLayerEmbeddings(nn.Module):
    """Residual connection that adds the output of a sublayer to the hidden states. If the sublayer is an MLP, the
    connection then adds the layer's gated embeddings."""

    def __init__(self, sublayer: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.hidden = config.hidden_size
        layer, _, kind = sublayer.rpartition(".")
        self.embeddings = LayerEmbeddings(f"{layer}.per_layer", config, ctx) if kind == "mlp" else None

    @staticmethod
    def enter(x: Tensor, config: TransformerConfig) -> Tensor:
        """Return the stream [s, b, 2h + e] for the word embeddings x [s, b, h]."""
        return torch.cat((x, F.pad(x, (0, size_of(config)))), dim=-1)

    @staticmethod
    def leave(norm: str, config: TransformerConfig, ctx: TPContext) -> nn.Module:
        return HiddenStates(config.hidden_size)

    @staticmethod
    def scaled(stream: Tensor, factor: Tensor, config: TransformerConfig) -> Tensor:
        """Multiply the hidden states in a stream by a factor."""
        x, rest = stream.split((config.hidden_size, config.hidden_size + size_of(config)), dim=-1)
        return torch.cat((x * factor, rest), dim=-1)

    def forward(
        self, stream: Tensor, sublayer: Callable[[Tensor, BatchContext], Tensor], context: BatchContext
    ) -> Tensor:
        """Apply the sublayer to the stream, and return the updated stream. The old and the updated stream are [s, b, 2h
        + e], or [s/tp, b, 2h + e] under sequence parallelism."""
        x, carried = stream.split((self.hidden, stream.shape[-1] - self.hidden), dim=-1)
        x = x + sublayer(x, context)
        if self.embeddings is not None:
            x, carried = self.embeddings(x, carried, context)
        return torch.cat((x, carried), dim=-1)


class HiddenStates(nn.Module):
    """Module that extracts the hidden states from the stream after the last layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, stream: Tensor) -> Tensor:
        """Return the hidden states [s, b, h] in the stream [s, b, 2h + e]. Under sequence parallelism, the first
        dimension is s/tp."""
        return stream[..., : self.hidden].contiguous()


class LayerEmbeddings(nn.Module):
    """Module that adds norm(W (act(G x) * p)) to the hidden states x of a layer.

    The per-layer embedding p of a token is (norm(P v / sqrt(h)) + sqrt(e) r) / sqrt(2), where r is the token's row of
    the embedding table, and v is the token's word embedding.
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        hidden, size = config.hidden_size, size_of(config)
        self.size, self.eps = size, config.norm_epsilon
        self.tp = ctx.tp
        self.sequence_parallel = ctx.sequence_parallel
        table = ParamMeta(f"{name}.embedding.weight", (config.vocab_size or 0, size), {"tp": 1}, role="embedding")
        self.table = make_parameter(table, ctx)
        self.context_proj = column_parallel(ColumnLinear(f"{name}.context_proj", hidden, (size,), False), ctx)
        self.gate = column_parallel(ColumnLinear(f"{name}.gate", hidden, (size,), False), ctx)
        self.proj = row_parallel(RowLinear(f"{name}.proj", size, hidden, False), ctx)
        self.layernorm = build_norm(f"{name}.layernorm", hidden, config, ctx)
        self.approximate = GATES.get(config.activation, "none")
        self.scales = hidden**-0.5, rounded(sqrt(size), ctx.dtype)
        self.context_layernorm = None
        """Weight of the norm that every layer applies to the output of its `context_proj`. All layers share this
        parameter, which layer 0 owns; the attribute is None in the other layers."""
        if ctx.layer == 0:
            partial_over = sequence_partial(ctx.sequence_parallel)
            weight = ParamMeta(f"{name}.context_layernorm.weight", (size,), partial_over=partial_over, role="norm")
            self.context_layernorm = make_parameter(weight, ctx)

    def forward(self, x: Tensor, carried: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Return the updated hidden states and the updated rest of the stream. The hidden states x are [s, b, h], and
        the rest of the stream, `carried`, is [s, b, h + e]. Under sequence parallelism, the first dimension is s/tp."""
        words, weight = carried.split((carried.shape[-1] - self.size, self.size), dim=-1)
        if self.context_layernorm is not None:
            weight = self.context_layernorm.expand_as(weight)
            carried = torch.cat((words, weight), dim=-1)
        gated = self._activated(self.gate(x)) * self._inputs(words.contiguous(), weight[0, 0], context)
        return x + self.layernorm(self.proj(gated)), carried

    def _activated(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self.approximate == "silu" else F.gelu(gate, approximate=self.approximate)

    def _inputs(self, words: Tensor, weight: Tensor, context: BatchContext) -> Tensor:
        """Compute the per-layer embeddings p [s, b, e/tp] of all tokens, as defined in the docstring of the class.
        `words` contains the word embeddings [s, b, h], or [s/tp, b, h] under sequence parallelism. `weight` is the norm
        weight [e]."""
        of_words, of_rows = self.scales
        assert context.tokens is not None
        rows = EmbeddingFunction.apply(context.tokens.t(), self.table, LOCAL, Axis())
        return (self._normed(self.context_proj(words) * of_words, weight) + rows * of_rows) * 2**-0.5

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize x [s, b, e/tp] over the channels of all ranks, and multiply the result by this rank's shard of the
        weight [e]."""
        wide = x.float() if x.itemsize == 2 else x
        # the output of every rank depends on the sum of squares over all ranks, so the gradient of this sum must also
        # be summed over the ranks
        squares = copy_to(reduce_from(wide.square().sum(-1, keepdim=True), self.tp), self.tp)
        # under sequence parallelism, `weight` comes from different tokens on each rank, and its gradient is summed over
        # the ranks later
        weight = weight if self.sequence_parallel else copy_to(weight, self.tp)
        own = weight.chunk(self.tp.size)[self.tp.rank].to(wide.dtype)
        return (wide * torch.rsqrt(squares / self.size + self.eps) * own).to(x.dtype)
