"""Self-attention with values that are divided by their root mean square."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.layers import Span
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Fused
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.self_attention import Heads, SelfAttention, attention_linears
from megatron.extensions.attention.normed_values.flags import NormedValuesFlags


class NormedValueAttention(SelfAttention):
    """`SelfAttention` that divides each value head by its root mean square.

    With --global-keys-as-values a layer without window or chunks has linear_qk [groups, q_per_group + 1, head_dim, h]
    in place of linear_qkv: the query heads of a group, then its key, from which the value is made too.
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        everywhere = config.layer(ctx.layer).span == Span()
        self.keys_are_values = everywhere and config.options(NormedValuesFlags).global_keys_as_values
        super().__init__(name, config, ctx)
        self.eps = config.norm_epsilon
        if self.keys_are_values:
            self.group_rows = (*self.group_rows[:3], 0)

    def linears(self, name: str, config: TransformerConfig) -> tuple[ColumnLinear, RowLinear]:
        qkv, proj = attention_linears(name, config)
        if not self.keys_are_values:
            return qkv, proj
        queries, out = config.queries_per_group, (config.query_groups, config.queries_per_group + 1, config.head_dim)
        return replace(qkv, name=f"{name}.linear_qk", out_dims=out, fused=Fused("qkv", 1, (queries, 1))), proj

    def split(self, qkv: Tensor) -> Heads:
        q, gate, k, v = super().split(qkv)
        v = k if self.keys_are_values else v
        return q, gate, k, F.rms_norm(v, v.shape[-1:], None, self.eps)
