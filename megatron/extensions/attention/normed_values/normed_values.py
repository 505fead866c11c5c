"""Self-attention whose values are divided by their root mean square."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.layers import Span
from megatron.core.config.model import TransformerConfig
from megatron.core.host_to_device import has_values
from megatron.core.param_meta import Fused
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.self_attention import Heads, SelfAttention, attention_linears
from megatron.extensions.attention.normed_values.flags import NormedValuesFlags, source_of


class NormedValueAttention(SelfAttention):
    """`SelfAttention` that divides each value head by its root mean square.

    With --global-keys-as-values, layers that have neither a sliding window nor attention chunks use linear_qk instead
    of linear_qkv. The weight of linear_qk is [groups, q_per_group + 1, head_dim, h]. Each group consists of the query
    heads of the group and one key head, whose keys also serve as values. Each of the last --kv-shared-layers layers
    attends to the keys and values of an earlier layer. These layers have only linear_q, whose weight is [groups,
    q_per_group, head_dim, h].
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        everywhere = config.layer(ctx.layer).span == Span()
        self.keys_are_values = everywhere and config.options(NormedValuesFlags).global_keys_as_values
        self.source = source_of(config, ctx.layer)
        super().__init__(name, config, ctx)
        self.eps = config.norm_epsilon
        self.is_source = any(source_of(config, number) == ctx.layer for number in range(config.num_layers))
        self.groups, self.widths = config.query_groups // ctx.tp.size, self.group_rows[2:]
        if self.keys_are_values:
            self.widths = (self.head_dim, self.head_dim)
            self.group_rows = (*self.group_rows[:3], 0)
        if self.source is not None:
            self.k_layernorm = nn.Identity()
            self.group_rows = (*self.group_rows[:2], 0, 0)

    def linears(self, name: str, config: TransformerConfig) -> tuple[ColumnLinear, RowLinear]:
        qkv, proj = attention_linears(name, config)
        if self.source is not None:
            rows = config.head_counts[:2] if config.has_even_heads else config.group_rows[:2]
            out = (config.query_groups, sum(rows), *qkv.out_dims[2:])
            return replace(qkv, name=f"{name}.linear_q", out_dims=out, fused=None), proj
        if not self.keys_are_values:
            return qkv, proj
        queries, out = config.queries_per_group, (config.query_groups, config.queries_per_group + 1, config.head_dim)
        return replace(qkv, name=f"{name}.linear_qk", out_dims=out, fused=Fused("qkv", 1, (queries, 1))), proj

    def split(self, qkv: Tensor) -> Heads:
        q, gate, k, v = super().split(qkv)
        v = k if self.keys_are_values else v
        return q, gate, k, F.rms_norm(v, v.shape[-1:], None, self.eps)

    def _project(self, x: Tensor, context: BatchContext) -> Heads:
        if self.source is not None:
            return self._with_earlier_keys(x, context, self.source)
        q, gate, k, v = super()._project(x, context)
        if self.is_source:
            context.left[self.layer] = torch.cat((k, v), dim=-1)
        return q, gate, k, v

    def _with_earlier_keys(self, x: Tensor, context: BatchContext, source: int) -> Heads:
        """Return the queries of this layer, and the keys and values of layer `source`."""
        q, gate, *_ = SelfAttention.split(self, self.linear_qkv(x))
        q = q if self.normed_last else self.q_layernorm(q)
        if self.rotation is not None:
            q, _ = self.rotate(q, q[:, :, :0], *context.rotary[self.rotation])
        q = self.q_layernorm(q) if self.normed_last else q
        both = context.left.get(source)
        if both is None:
            # Only the planner reaches this line. The planner runs each layer separately on fake tensors, so the keys
            # and values
            # of layer `source` do not exist.
            assert not has_values(x), f"layer {source} is in another stage"
            both = q.new_zeros(*q.shape[:2], self.groups, sum(self.widths))
        k, v = both.split(self.widths, dim=-1)
        return q, gate, k, v
