"""Multi-latent attention (MLA) of DeepSeek-V2 (arXiv 2405.04434, section 2.1) and DeepSeek-V3 (arXiv 2412.19437,
section 2.1).

Down-projections map the hidden states of each token to a query latent and a key-value latent, and up-projections map
these latents to heads. Each query head and each key head consists of non-rotary channels and rotary channels. The
rotary channels of the key are projected directly from the hidden states, and are shared by all heads.

Every tensor-parallel rank computes the full latents, but only a part of the heads: the down-projections are replicated,
and the up-projections are sharded by heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.attention.core_attention import CoreAttention, sinks_metas
from megatron.core.attention.logits import HeadRows, RowKind
from megatron.core.batch import BatchContext, EarlierTokens
from megatron.core.collectives import all_gather_sequence, copy_to
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import ReplicatedParallelLinear, TPContext, column_parallel, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, ReplicatedLinear, RowLinear
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.recompute import recomputed, with_input_recomputed
from megatron.core.transformer.rotary import apply_rotary_interleaved, scaled_queries
from megatron.core.transformer.self_attention import gated_output, head_wise_gated_output
from megatron.extensions.attention.latent_attention.flags import LatentAttentionFlags

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries and keys [s, b, heads/tp, qk_head_dim + qk_pos_emb_head_dim], followed by values [s, b, heads/tp,
v_head_dim]."""


class Latents(NamedTuple):
    """Latents from which the heads are projected, and rotary channels of the keys."""

    q: Tensor
    """Query latents [s, b, q_lora_rank], or the hidden states [s, b, h] if there is no query latent. Under sequence
    parallelism, the first dimension is s/tp. With --mla-latent-gate, the shape is [s, b, 2 * q_lora_rank]: each
    normalized latent is concatenated with the same latent before normalization."""

    kv: Tensor
    """Key-value latents [s, b, kv_lora_rank]. Under sequence parallelism, the first dimension is s/tp."""

    key: Tensor
    """Rotary channels [s, b, 1, qk_pos_emb_head_dim] of the keys, which all heads share."""


@dataclass(frozen=True)
class LatentLinears:
    """Linear layers of multi-latent attention. Only linear_proj can have a bias. The configuration field
    `add_bias_linear` or `add_attention_output_bias` enables this bias."""

    q_down: ReplicatedLinear | None
    """Layer linear_q_down_proj, which computes query latents; None if there is no query latent."""

    q: ColumnLinear
    """Layer linear_q_up_proj with weight [heads, qk_head_dim + qk_pos_emb_head_dim, q_lora_rank], or [..., 2 *
    q_lora_rank] with --mla-latent-gate. If there is no query latent, the layer is linear_q_proj with weight [...,
    h]."""

    kv_down: ReplicatedLinear
    """Layer linear_kv_down_proj with weight [kv_lora_rank + qk_pos_emb_head_dim, h]. The output of the layer is the
    key-value latent, followed by the rotary key that all heads share."""

    kv_up: ColumnLinear
    """Layer linear_kv_up_proj with weight [heads, qk_head_dim + v_head_dim, kv_lora_rank]. The rows of each head
    produce the non-rotary channels of the key, followed by the value."""

    proj: RowLinear
    """Layer linear_proj with weight [h, heads * v_head_dim]."""

    norms: dict[str, int]
    """Mapping from the name of each latent norm to its width; empty if there are no latent norms."""


def latent_linears(name: str, config: TransformerConfig) -> LatentLinears:
    """Return the linear layers and norms of multi-latent attention (arXiv 2405.04434, equations 37 to 47)."""
    own = config.options(LatentAttentionFlags)
    hidden = config.hidden_size
    heads = config.num_attention_heads
    q_rank = own.q_lora_rank
    kv_rank = own.kv_lora_rank
    rotary = own.qk_pos_emb_head_dim
    q_name = f"{name}.linear_q_up_proj" if q_rank else f"{name}.linear_q_proj"
    q_in = (q_rank or hidden) * (2 if own.mla_latent_gate else 1)
    kv_out = (heads, own.qk_head_dim + own.v_head_dim)
    of_output = config.add_bias_linear or config.add_attention_output_bias
    norms = {"q_layernorm": q_rank, "kv_layernorm": kv_rank} if config.qk_layernorm else {}
    return LatentLinears(
        ReplicatedLinear(f"{name}.linear_q_down_proj", hidden, q_rank, False) if q_rank else None,
        ColumnLinear(q_name, q_in, (heads, config.head_dim), False),
        ReplicatedLinear(f"{name}.linear_kv_down_proj", hidden, kv_rank + rotary, False),
        ColumnLinear(f"{name}.linear_kv_up_proj", kv_rank, kv_out, False),
        RowLinear(f"{name}.linear_proj", config.attention_output_size, hidden, of_output),
        {f"{name}.{norm}": width for norm, width in norms.items() if width},
    )


def gate_linear(name: str, config: TransformerConfig) -> ColumnLinear | None:
    """Return the layer linear_gate, which computes the gates by which head outputs are multiplied; return None if the
    model has no such gates. The weight of linear_gate is [heads, h] for one gate per head, or [heads, v_head_dim, 2 *
    q_lora_rank] for one gate per channel of each head."""
    own, heads = config.options(LatentAttentionFlags), config.num_attention_heads
    if own.mla_latent_gate and own.q_lora_rank:
        return ColumnLinear(f"{name}.linear_gate", 2 * own.q_lora_rank, (heads, own.v_head_dim), False)
    return ColumnLinear(f"{name}.linear_gate", config.hidden_size, (heads,), False) if own.mla_head_gate else None


class MultiLatentAttention(nn.Module):
    """Multi-latent attention (MLA): down-projections, latent norms, up-projections, the rotary embedding, core
    attention, and an output projection.

    The rotary embedding rotates pairs of adjacent channels, as in DeepSeek's weights.
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.layer, self.tp = ctx.layer, ctx.tp
        own = config.options(LatentAttentionFlags)
        self.kv_rank, self.key_width = own.kv_lora_rank, own.qk_head_dim
        self.value_width, self.rotary_width = own.v_head_dim, own.qk_pos_emb_head_dim
        linears = latent_linears(name, config)
        self.linear_q_down = nn.Identity() if linears.q_down is None else ReplicatedParallelLinear(linears.q_down, ctx)
        self.linear_q = column_parallel(linears.q, ctx)
        self.linear_kv_down = ReplicatedParallelLinear(linears.kv_down, ctx)
        self.linear_kv_up = column_parallel(linears.kv_up, ctx)
        of_norms = replace(config, norm_epsilon=own.latent_norm_epsilon or config.norm_epsilon)
        self.q_layernorm, self.kv_layernorm = (
            build_norm(norm, linears.norms[norm], of_norms, ctx) if norm in linears.norms else nn.Identity()
            for norm in (f"{name}.q_layernorm", f"{name}.kv_layernorm")
        )
        scaled = {"q": own.q_lora_rank, "kv": own.kv_lora_rank} if own.mla_scale_latents else {}
        self.scales = {of: (config.hidden_size / rank) ** 0.5 for of, rank in scaled.items() if rank}
        self.linear_proj = row_parallel(linears.proj, ctx)
        gate = gate_linear(name, config)
        self.linear_gate = None if gate is None else column_parallel(gate, ctx)
        self.gates_latents = own.mla_latent_gate
        self.gated = region(gated_output if self.gates_latents else head_wise_gated_output, ctx.compiled)
        self.core = CoreAttention(name, config, ctx, sinks_metas(name, config))
        kind = config.layer(ctx.layer)
        self.rotation, self.tempered = kind.rotation, kind.tempered
        self.to_heads = all_gather_sequence if ctx.sequence_parallel else copy_to
        self.rotate = region(rotated_heads, ctx.compiled)
        self.recompute_core = config.recomputes("core_attn")
        self.recompute_heads = config.recomputes("mla_up_proj")

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the attention output for the input x. The input and the output are [s, b, h]; sequence parallelism
        divides s by tp, and context parallelism divides s by cp."""
        latents = self._latents(x)
        if context.cache is not None:
            return self._projected_back(self._behind_cache(latents, context.cache, context), latents, x)
        recompute_core, recompute_heads = (
            part and self.training for part in (self.recompute_core, self.recompute_heads)
        )
        if recompute_core and recompute_heads:
            out = recomputed(self._attend, latents, context)
        elif recompute_heads:
            out = with_input_recomputed(lambda latents: self._heads(latents, context), latents, self.core, context)
        elif recompute_core:
            out = recomputed(self.core, *self._heads(latents, context), context)
        else:
            out = self._attend(latents, context)
        return self._projected_back(out, latents, x)

    def _projected_back(self, out: Tensor, latents: Latents, x: Tensor) -> Tensor:
        """Apply the gates, if there are any, and the output projection to the head outputs [s, b, heads/tp *
        v_head_dim]."""
        if self.linear_gate is None:
            return self.linear_proj(out)
        gate = self.linear_gate(latents.q if self.gates_latents else x)
        return self.linear_proj(self.gated(out, gate, "sigmoid"))

    def logit_rows(self) -> tuple[HeadRows, ...]:
        """Describe which weight rows of the up-projections produce queries, keys and values. The rotary key, which all
        heads share, is not included, because the down-projection produces it."""
        of_q = (RowKind.QUERY, self.key_width), (RowKind.QUERY_OF_SHARED_KEY, self.rotary_width)
        of_kv = (RowKind.KEY, self.key_width), (RowKind.OTHER, self.value_width)
        return HeadRows(self.linear_q, 1, of_q), HeadRows(self.linear_kv_up, 1, of_kv)

    def _latents(self, x: Tensor) -> Latents:
        down = self.linear_q_down(x)
        q = self._scaled(self.q_layernorm(down), "q")
        q = torch.cat((q, down), dim=-1) if self.gates_latents else q
        kv, key = self.linear_kv_down(x).split((self.kv_rank, self.rotary_width), dim=-1)
        return Latents(q, self._scaled(self.kv_layernorm(kv), "kv"), self.to_heads(key, self.tp).unsqueeze(2))

    def _scaled(self, latent: Tensor, of: str) -> Tensor:
        return latent * self.scales[of] if of in self.scales else latent

    def _attend(self, latents: Latents, context: BatchContext) -> Tensor:
        """Return the head outputs [s, b, heads/tp * v_head_dim]."""
        return self.core(*self._heads(latents, context), context)

    def _heads(self, latents: Latents, context: BatchContext) -> Heads:
        kv = self.linear_kv_up(latents.kv).unflatten(-1, (-1, self.key_width + self.value_width))
        return self.rotate(self._queries(latents, context), kv, latents.key, *self._tables(context))

    def _tables(self, context: BatchContext) -> tuple[Tensor, ...]:
        """Return the cosines and sines of the rotary embedding; return an empty tuple if the layer has no rotary
        embedding."""
        return () if self.rotation is None else context.rotary[self.rotation]

    def _queries(self, latents: Latents, context: BatchContext) -> Tensor:
        q = self.linear_q(latents.q).unflatten(-1, (-1, self.key_width + self.rotary_width))
        if not self.tempered:
            return q
        assert context.query_scales is not None
        return scaled_queries(q, context.query_scales)

    def _behind_cache(self, latents: Latents, cache: EarlierTokens, context: BatchContext) -> Tensor:
        """Compute attention to the cached latents of earlier tokens. Return the head outputs [s, b, heads/tp *
        v_head_dim].

        All heads attend to the latents, which serve as both keys and values. The key up-projection is applied to the
        queries, and the value up-projection is applied to the output, so that the latents of earlier tokens need not be
        projected to heads again (section 2.1.2).
        """
        key = rotated(latents.key, *self._tables(context))
        kv = self.to_heads(latents.kv, self.tp).unsqueeze(2)
        cached = cache.append(self.layer, torch.cat((kv, key), dim=-1))
        if cached is None:
            return self._attend(latents, context)
        (k,) = cached
        q, up_value = self._absorbed(latents, context)
        out = self.core.behind_cache(q, k, k[..., : self.kv_rank], cache).unflatten(-1, (-1, self.kv_rank))
        return torch.einsum("sbnr,ndr->sbnd", out, up_value).flatten(2)

    def _absorbed(self, latents: Latents, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Apply the key up-projection to the queries, so that the queries can attend to latents directly. Return two
        tensors: the resulting queries [s, b, heads/tp, kv_lora_rank + qk_pos_emb_head_dim], and the weight [heads/tp,
        v_head_dim, kv_lora_rank] of the value up-projection."""
        up_key, up_value = self.linear_kv_up.weight.split((self.key_width, self.value_width), dim=1)
        q, rotary = self._queries(latents, context).split((self.key_width, self.rotary_width), dim=-1)
        rotary = rotated(rotary, *self._tables(context))
        return torch.cat((torch.einsum("sbnd,ndr->sbnr", q, up_key), rotary), dim=-1), up_value


def rotated(x: Tensor, *tables: Tensor) -> Tensor:
    """Apply the rotary embedding to x [s, b, heads, r]; return x unchanged if `tables` is empty."""
    return apply_rotary_interleaved(x, *tables) if tables else x


def rotated_heads(q: Tensor, kv: Tensor, key: Tensor, *tables: Tensor) -> Heads:
    """Assemble queries, keys and values, and rotate the last channels of queries and keys.

    Args:
        q: [s, b, heads, d + r], queries.
        kv: [s, b, heads, d + v], non-rotary channels of keys, followed by values.
        key: [s, b, 1, r], rotary channels of the keys, shared by all heads.
        tables: Cosines and sines of the rotary embedding; empty if the layer has no rotary embedding.

    Returns:
        Queries and keys [s, b, heads, d + r], and values [s, b, heads, v], as three tensors that do not share memory.
    """
    rotary = key.shape[-1]
    plain = q.shape[-1] - rotary
    q, q_rotary = q.split((plain, rotary), dim=-1)
    k, v = kv.split((plain, kv.shape[-1] - plain), dim=-1)
    q_rotary, key = rotated(q_rotary, *tables), rotated(key, *tables)
    key = key.expand(*k.shape[:-1], rotary)
    return torch.cat((q, q_rotary), dim=-1), torch.cat((k, key), dim=-1), v.contiguous()
