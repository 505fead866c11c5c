"""DeepSeek sparse attention (DSA) of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1).

In this variant of multi-latent attention, queries attend only to the keys that an indexer selects. Queries attend to
latents directly: the key up-projection is applied to the queries, and the value up-projection is applied to the output.
All heads of a query can therefore share the gathered keys.

The indexer is replicated on all tensor-parallel ranks. Under sequence parallelism, each rank's indexer selects keys for
the queries of its own tokens, and the ranks then gather the selected indices. Under context parallelism, the latents
and the indexer keys of the whole sequence are all-gathered, because both have few channels. --cp-comm-type has no
effect on layers with sparse attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core.attention.core_attention import CoreAttention
from megatron.core.attention.tile_kernels import TorchKernel
from megatron.core.attention.tiles import Documents, rank_spans
from megatron.core.batch import BatchContext, EarlierTokens
from megatron.core.collectives import all_gather, all_gather_sequence, local_slice
from megatron.core.config.model import TransformerConfig
from megatron.core.host_to_device import copied_to, has_values
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.layers import ReplicatedParallelLinear, TPContext
from megatron.core.tensor_parallel.linear_spec import ReplicatedLinear, sequence_partial
from megatron.core.transformer.norm import LayerNorm
from megatron.extensions.attention.context_parallel.attention import from_rank_order
from megatron.extensions.attention.latent_attention.flags import LatentAttentionFlags
from megatron.extensions.attention.latent_attention.multi_latent_attention import Latents, MultiLatentAttention, rotated
from megatron.extensions.attention.sparse_attention.flags import SparseAttentionFlags, selects
from megatron.extensions.attention.sparse_attention.indexer_loss import AttachLoss, Loss
from megatron.extensions.attention.sparse_attention.selected_attention import AttentionToSelected, Keys
from megatron.extensions.attention.sparse_attention.selection import CHUNK, Index, Queries, chunks_of, selected


class IndexerLinears(NamedTuple):
    """Linear layers of the indexer, named as in Megatron-LM. These layers are replicated on every rank and have no
    biases."""

    q: ReplicatedLinear
    """Layer linear_wq_b, which computes the indexer queries. The weight is [indexer heads * channels, q_lora_rank], or
    [indexer heads * channels, h] if there is no query latent."""

    k: ReplicatedLinear
    """Layer linear_wk with weight [channels, h], which computes the key that all indexer heads share."""

    weights: ReplicatedLinear
    """Layer linear_weights_proj with weight [indexer heads, h], which computes the head weights."""


def indexer_linears(name: str, config: TransformerConfig) -> IndexerLinears:
    """Return the linear layers of an indexer. The names of the layers begin with the prefix `name`."""
    own = config.options(SparseAttentionFlags)
    hidden = config.hidden_size
    heads, width = own.dsa_indexer_n_heads, own.dsa_indexer_head_dim
    q_rank = config.options(LatentAttentionFlags).q_lora_rank or hidden
    return IndexerLinears(
        ReplicatedLinear(f"{name}.linear_wq_b", q_rank, heads * width, False),
        ReplicatedLinear(f"{name}.linear_wk", hidden, width, False),
        ReplicatedLinear(f"{name}.linear_weights_proj", hidden, heads, False, role="gate"),
    )


def of_key_norm(config: TransformerConfig) -> TransformerConfig:
    """Return a configuration for the LayerNorm of indexer keys. Indexer keys are normalized by a LayerNorm even if the
    model's norms have a different type. The epsilon of this LayerNorm is the epsilon of the latent norms."""
    epsilon = config.options(LatentAttentionFlags).latent_norm_epsilon or config.norm_epsilon
    return replace(config, norm_epsilon=epsilon, apply_layernorm_1p=False, norm_parameters="all")


class Indexer(nn.Module):
    """Indexer that computes queries for several heads, one key per token that these heads share, and head weights. The
    inputs of the indexer receive no gradient."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        linears, own = indexer_linears(name, config), config.options(SparseAttentionFlags)
        self.heads, self.width = own.dsa_indexer_n_heads, own.dsa_indexer_head_dim
        self.linear_wq_b, self.linear_wk, self.linear_weights_proj = (
            ReplicatedParallelLinear(linear, ctx) for linear in (linears.q, linears.k, linears.weights)
        )
        self.rank = linears.q.in_size
        partial_over = sequence_partial(ctx.sequence_parallel)
        self.k_norm = LayerNorm(f"{name}.k_norm", self.width, of_key_norm(config), ctx, partial_over)

    def forward(self, x: Tensor, q: Tensor) -> Index:
        """Compute the operands of the indexer scores, before rotary embeddings are applied. x contains the hidden
        states [s, b, h]. q contains the query latents [s, b, q_lora_rank], or is x if there is no query latent. Under
        sequence parallelism, the first dimension of x and q is s/tp."""
        x, q = x.detach(), q.detach()
        weights = self.linear_weights_proj(x) * (self.heads * self.width) ** -0.5
        return Index(
            self.linear_wq_b(q).unflatten(-1, (self.heads, self.width)), self.k_norm(self.linear_wk(x)), weights
        )


class SparseLatents(NamedTuple):
    """The fields of `Latents`, and the operands of the indexer scores."""

    q: Tensor
    kv: Tensor
    key: Tensor
    index_q: Tensor
    index_k: Tensor
    index_weights: Tensor


def parted(operands: Sequence[Tensor | BatchContext]) -> tuple[list[Tensor], BatchContext]:
    """Split the arguments of a module into its input tensors and the batch context, which is the last argument."""
    *tensors, context = operands
    assert isinstance(context, BatchContext)
    return [x for x in tensors if isinstance(x, Tensor)], context


class SelectedKeys(CoreAttention):
    """Module that computes attention to the selected keys and applies the value up-projection."""

    def __init__(
        self, name: str, config: TransformerConfig, ctx: TPContext, width: int, sinks: Sequence[ParamMeta] = ()
    ) -> None:
        """Initialize the module.

        Args:
            name: Prefix of the parameter names.
            config: Model configuration.
            ctx: Tensor-parallel context of the layer.
            width: Number of key channels that also serve as values.
            sinks: Metadata of the parameters for attention sinks.
        """
        super().__init__(name, config, ctx, sinks)
        own = config.options(SparseAttentionFlags)
        self.width = width
        self.tp = ctx.tp
        self.layer = ctx.layer
        self.topk, self.coeff = own.dsa_indexer_topk, own.dsa_indexer_loss_coeff
        self.index_heads, self.shares = own.dsa_indexer_n_heads, own.dsa_indexer_topk_freq > 1
        self.sparse_loss = own.dsa_indexer_use_sparse_loss
        self.rows = ctx.tp if ctx.sequence_parallel else Axis()
        """Ranks over which the tokens of the indexer's operands are sharded."""
        self.kernel = self.varlen_kernel = TorchKernel(self.scale)
        self.always_tiles, self.sink_heads = True, slice(0, self.local_heads)
        self.tally = torch.zeros(2, dtype=torch.float64, device=ctx.device)
        """Sum of the indexer losses of all tokens since the last reset, and the number of these tokens."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        up_value: Tensor,
        *index_and_context: Tensor | BatchContext,
    ) -> Tensor:
        """Return the head outputs [s, b, heads/tp * v_head_dim]. Under context parallelism, the first dimension is
        s/cp.

        Args:
            q: [s, b, heads/tp, w], queries.
            k: [s, b, w], keys.
            up_value: [heads/tp, v_head_dim, kv_lora_rank], up-projection of values.
            index_and_context: Operands of the indexer scores, followed by the batch context. The operands are index_q
                [s, b, indexer heads, d], index_k [s, b, d] and index_weights [s, b, indexer heads]. Under sequence
                parallelism, the first dimension of the operands is s/(cp * tp). A layer without an indexer has only the
                batch context.
        """
        operands, context = parted(index_and_context)
        index = Index(*operands) if operands else None
        keys = [k] if index is None else [k, all_gather_sequence(index.k, self.rows)]
        cached = None if context.cache is None else context.cache.append(self.layer, *(x.unsqueeze(2) for x in keys))
        if cached is not None:
            keys = [x.squeeze(1).transpose(0, 1) for x in cached]
        else:
            keys = [from_rank_order(all_gather_sequence(x, self.cp), self.cp.size) for x in keys]
        k, queries = keys[0], self._queries(q, keys[0], None if cached is None else context.cache, context)
        if index is None:
            out, *_ = self._attend(q, (Keys(queries, self._selected_before(queries, q.shape[1], context)),), k)
        else:
            index = index._replace(k=keys[1])
            seen = Keys(queries, self._select(index, queries))
            if self.shares:
                context.left[self.layer] = seen.picked
            out, lse, _ = self._attend(q, (seen,), k)
            out = self._with_loss(out, index, q, k, seen, context, lse)
        return torch.einsum("sbnr,ndr->sbnd", out, up_value).flatten(2)

    def _selected_before(self, queries: Queries, samples: int, context: BatchContext) -> Tensor | None:
        """Return the indices of the keys that the nearest earlier layer with an indexer selected; return None if every
        query attends to all earlier keys."""
        if found := [number for number in context.left if number < self.layer]:
            picked: Tensor | None = context.left[max(found)]
            return picked
        last = queries.last
        assert not has_values(last), "a stage begins with a layer without an indexer"
        # Only the planner reaches this line, because it runs each layer separately. The planner needs only the shape of
        # the selection.
        every = max(chunk.keys for chunk in queries.chunks) <= self.topk
        return None if every else last.unsqueeze(-1).expand(-1, samples, self.topk)

    def _attend(self, q: Tensor, seen: tuple[Keys, ...], *k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return AttentionToSelected.apply(q, self._sinks, seen, self.scale, self.width, self.note, *k)

    def _own(self, index: Index) -> range:
        """Return the range of queries for which this rank's indexer selects keys."""
        rows = len(index.q)
        return range(self.rows.rank * rows, (self.rows.rank + 1) * rows)

    def _select(self, index: Index, queries: Queries) -> Tensor | None:
        """Return the indices [n, b, topk] of the keys that each query attends to; return None if every query attends to
        all earlier keys."""
        if max(chunk.keys for chunk in queries.chunks) <= self.topk:
            return None
        own = self._own(index)
        mine = tuple(chunk.moved(own.start) for chunk in queries.chunks if chunk.rows.start in own)
        first, last = (bound[own.start : own.stop] for bound in (queries.first, queries.last))
        of_own = queries._replace(first=first, last=last, chunks=mine)
        return all_gather(selected(index, of_own, self.topk), self.rows)

    def _with_loss(
        self,
        out: Tensor,
        index: Index,
        q: Tensor,
        k: Tensor,
        seen: Keys,
        context: BatchContext,
        lse: Tensor,
        beside: Tensor | None = None,
    ) -> Tensor:
        """Return `out` unchanged. In training, also compute the indexer loss, so that the backward pass returns
        the gradients of this loss."""
        if not self.training:
            return out
        trained = index.q.requires_grad and self.coeff > 0 and context.aux_scale is not None
        of_loss = q.detach(), k.detach(), seen.picked if self.sparse_loss else None, seen.queries, self.scale
        lse_of_loss = lse if self.sparse_loss else None
        loss = Loss(*of_loss, self.tp, self._own(index), beside, lse_of_loss) if trained else None
        scale = None if context.aux_scale is None else context.aux_scale * self.coeff
        return AttachLoss.apply(out, loss, scale, self.tally, *index)

    def _queries(self, q: Tensor, k: Tensor, cache: EarlierTokens | None, context: BatchContext) -> Queries:
        """Return the positions of the keys that this rank's queries may attend to."""
        (n, b, heads, width), length = q.shape, len(k)
        of_query = b * max(self.index_heads * length, max(heads, width) * min(self.topk, length))
        if cache is not None:
            chunks = chunks_of((range(n),), self.rows.size, max(1, CHUNK // of_query), length)
            return Queries(q.new_zeros((n, 1), dtype=torch.int64), cache.positions.t(), chunks, self.hardware, length)
        chunks = chunks_of(rank_spans(length, self.cp.rank, self.cp.size), self.rows.size, max(1, CHUNK // of_query))
        last = context.places_of(q, 0)
        if context.documents is None:
            return Queries(torch.zeros_like(last)[:, None], last[:, None], chunks, self.hardware, length)
        begins = document_begins(context.documents, length, q.device)[last]
        return Queries(begins, last[:, None], chunks, self.hardware, length)


@lru_cache(maxsize=64)
def document_begins(documents: Documents, length: int, device: torch.device) -> Tensor:
    """Return the positions [s, b] of the first token of each token's document. Each sample has `length` tokens."""
    begins = np.zeros((length, len(documents)), dtype=np.int64)
    for sample, places in enumerate(documents):
        begins[list(places), sample] = places
    return copied_to(torch.from_numpy(np.maximum.accumulate(begins)), device)


class SparseAttention(MultiLatentAttention):
    """Multi-latent attention in which queries attend only to the keys that an indexer selects.

    Adjacent rotary channels form a pair, both in the indexer and in attention. In the indexer, the rotary channels are
    the first channels of a head.
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        chosen = selects(config, ctx.layer)
        self.indexer = Indexer(f"{name}.indexer", config, ctx) if chosen else None
        self.core = core = SelectedKeys(name, config, ctx, self.kv_rank)
        self.rows = core.rows

    def _latents(self, x: Tensor) -> Latents | SparseLatents:  # type: ignore[override]
        latents = super()._latents(x)
        if self.indexer is None:
            return latents
        return SparseLatents(*latents, *self.indexer(x, latents.q[..., : self.indexer.rank]))

    def _heads(self, latents: Latents | SparseLatents, context: BatchContext) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return the tensors that are passed to `SelectedKeys.forward`."""
        tables = self._tables(context)
        q, up_value = self._absorbed(Latents(*latents[:3]), context)
        k = torch.cat((self.to_heads(latents.kv, self.tp), rotated(latents.key, *tables).squeeze(2)), dim=-1)
        if not isinstance(latents, SparseLatents):
            return q, k, up_value
        own = tuple(local_slice(table, self.rows) for table in tables)
        index_k = rotated(latents.index_k.unsqueeze(2), *own).squeeze(2)
        return q, k, up_value, rotated(latents.index_q, *own), index_k, latents.index_weights

    def _behind_cache(self, latents: Latents | SparseLatents, cache: EarlierTokens, context: BatchContext) -> Tensor:
        return self._attend(latents, context)  # type: ignore[arg-type]
