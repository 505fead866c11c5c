"""Self-attention with grouped queries (arXiv:2305.13245). The query groups are sharded over the tensor-parallel
ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.attention.core_attention import CoreAttention, sinks_metas
from megatron.core.attention.logits import HeadRows, RowKind
from megatron.core.batch import BatchContext
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Fused
from megatron.core.tensor_parallel.layers import TPContext, column_parallel, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.norm import build_query_key_norms
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.rotary import (
    rotate_queries_and_keys,
    rotate_queries_and_keys_interleaved,
    scaled_queries,
)

Heads = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""Queries [s, b, heads, d], output gates [s, b, heads * d] or None, keys [s, b, groups, d], and values [s, b, groups,
d]."""


class SelfAttention(nn.Module):
    """Self-attention sublayer, which consists of the projection to queries, keys and values, optional query and key
    norms, the rotary embedding, core attention, and the output projection.

    The weight of linear_qkv has the shape [groups, q_per_group + 2, head_dim, h]. For each group, the weight contains
    the query heads, the key head and the value head, in this order. With --attention-output-gate, the output gates
    follow the query heads. If query and value heads differ in width, the weight has the shape [groups, rows per group,
    h].
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.layer = ctx.layer
        self.head_dim = config.head_dim
        self.head_counts = config.head_counts
        self.group_rows, self.value_scale = config.group_rows, config.attention_value_scale
        self.bound, self.normed_last = config.clip_qkv, config.qk_layernorm_after_rotary
        qkv, proj = self.linears(name, config)
        self.linear_qkv = column_parallel(qkv, ctx)
        self.q_layernorm, self.k_layernorm = build_query_key_norms(name, config, ctx)
        self.core = CoreAttention(name, config, ctx, sinks_metas(name, config))
        rotate = rotate_queries_and_keys_interleaved if config.rotary_interleaved else rotate_queries_and_keys
        self.rotate = region(rotate, ctx.compiled)
        self.recompute_core = config.recomputes("core_attn")
        kind = config.layer(ctx.layer)
        self.rotation, self.tempered = kind.rotation, kind.tempered
        self.scaled = region(scaled_queries, ctx.compiled)
        self.gated = region(head_wise_gated_output if config.head_wise_attn_gate else gated_output, ctx.compiled)
        self.gate_function = config.attention_gate_function
        self.linear_proj = row_parallel(proj, ctx)

    def linears(self, name: str, config: TransformerConfig) -> tuple[ColumnLinear, RowLinear]:
        """Return the specifications of the linear layers `linear_qkv` and `linear_proj`. A subclass whose linear_qkv
        has different rows overrides this method and `split`."""
        return attention_linears(name, config)

    def forward(self, x: Tensor, context: BatchContext, addend: Tensor | None = None) -> Tensor:
        """Run the attention sublayer: x [s, b, h] -> [s, b, h]. s is the number of tokens on this rank, that is, the
        sequence length divided by cp, and also divided by tp under sequence parallelism.

        If `addend` [s, b, h] is given, it is added to the result. Pass it only if `linear_proj.takes_addend()` returns
        True.
        """
        q, gate, k, v = self._project(x, context)
        v = v if self.value_scale == 1 else v * self.value_scale
        if self.tempered:
            assert context.query_scales is not None
            q = self.scaled(q, context.query_scales)
        cached = None if context.cache is None else context.cache.append(self.layer, k, v)
        if cached is not None and context.cache is not None:
            k, v = cached
            out = self.core.behind_cache(q, k, v, context.cache)
        elif self.recompute_core and self.training:
            out = recomputed(self.core, q, k, v, context)
        else:
            out = self.core(q, k, v, context)
        return self.linear_proj(out if gate is None else self.gated(out, gate, self.gate_function), addend=addend)

    def logit_rows(self) -> tuple[HeadRows, ...]:
        """Describe which rows of linear_qkv compute queries, keys, or neither of the two (output gates and values)."""
        kinds = RowKind.QUERY, RowKind.OTHER, RowKind.KEY, RowKind.OTHER
        return (HeadRows(self.linear_qkv, self.head_counts[0], tuple(zip(kinds, self.group_rows, strict=True))),)

    def split(self, qkv: Tensor) -> Heads:
        """Split the output of linear_qkv into heads. The norms and the rotary embedding are applied after the split."""
        q, gate, k, v = qkv.unflatten(-1, (-1, sum(self.group_rows))).split(self.group_rows, dim=-1)
        gate = gate.flatten(2) if gate.shape[-1] else None
        return q.unflatten(-1, (-1, self.head_dim)).flatten(2, 3), gate, k, v

    def _project(self, x: Tensor, context: BatchContext) -> Heads:
        q, gate, k, v = self.split(self.linear_qkv(x))
        q, k = (q, k) if self.normed_last else (self.q_layernorm(q), self.k_layernorm(k))
        if self.bound is not None:
            q, k, v = (x.clamp(-self.bound, self.bound) for x in (q, k, v))
        if self.rotation is not None:
            q, k = self.rotate(q, k, *context.rotary[self.rotation])
        q, k = (self.q_layernorm(q), self.k_layernorm(k)) if self.normed_last else (q, k)
        return q, gate, k, v


def attention_linears(name: str, config: TransformerConfig) -> tuple[ColumnLinear, RowLinear]:
    """Return the specifications of linear_qkv and linear_proj. The weight of linear_qkv has the shape [groups, heads,
    channels, h], or [groups, rows, h] if query and value heads differ in width.

    Each query group has the following rows in linear_qkv, in this order: the query heads, the output gates of these
    heads (if the layer has gates), the key head and the value head.
    """
    hidden, bias = config.hidden_size, config.add_bias_linear
    of_output = bias or config.add_attention_output_bias
    even = config.has_even_heads
    sizes = config.head_counts if even else config.group_rows
    out_dims = (config.query_groups, sum(sizes), *((config.head_dim,) if even else ()))
    fused = Fused("qkv", 1, tuple(size for size in sizes if size))
    return (
        ColumnLinear(f"{name}.linear_qkv", hidden, out_dims, bias or config.add_qkv_bias, fused=fused),
        RowLinear(f"{name}.linear_proj", config.attention_output_size, hidden, of_output),
    )


def gated_output(x: Tensor, gate: Tensor, function: str) -> Tensor:
    """Multiply the attention output x [s, b, heads * d] by the output gates. The gates are the result of applying the
    function named `function` to `gate` [s, b, heads * d]."""
    return x * GATES[function](gate)


def head_wise_gated_output(x: Tensor, gate: Tensor, function: str) -> Tensor:
    """Multiply each head of the attention output x [s, b, heads * d] by the head's gate. The gates are the result of
    applying the function named `function` to `gate` [s, b, heads]."""
    return (x.unflatten(-1, (gate.shape[-1], -1)) * GATES[function](gate).unsqueeze(-1)).flatten(2)


GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}
