"""Self-attention that adds a bias to output gates and scales queries by their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.transformer.self_attention import Heads, SelfAttention
from megatron.extensions.attention.biased_gates.flags import BiasedGatesFlags


class BiasedGateAttention(SelfAttention):
    """`SelfAttention` with an additional parameter gate_bias [heads]: one bias per head, which is added to all output
    gates of the head. Heads are sharded over the tensor-parallel ranks."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        own, heads = config.options(BiasedGatesFlags), (config.num_attention_heads,)
        meta = ParamMeta(f"{name}.gate_bias", heads, {"tp": 0}, init=Init("zeros"), role="bias")
        self.gate_bias = make_parameter(meta, ctx)
        self.exponent, self.length = own.query_growth_exponent, own.query_growth_length
        self.grows = self.rotation is None and self.exponent > 0

    def split(self, qkv: Tensor) -> Heads:
        q, gate, k, v = super().split(qkv)
        assert gate is not None
        each = gate.unflatten(-1, (len(self.gate_bias), -1))
        return q, (each + self.gate_bias[:, None].to(gate.dtype)).flatten(2), k, v

    def _project(self, x: Tensor, context: BatchContext) -> Heads:
        q, gate, k, v = super()._project(x, context)
        return self._grown(q, context) if self.grows else q, gate, k, v

    def _grown(self, q: Tensor, context: BatchContext) -> Tensor:
        """Multiply the query at position p by (1 + (p + 1) / length)^exponent. The queries q are [s, b, heads/tp, d];
        16-bit queries are scaled in fp32."""
        positions = context.position_ids if context.position_ids is not None else context.places
        positions = torch.arange(len(q), device=q.device) if positions is None else positions
        share = ((positions[None] if positions.ndim == 1 else positions).t().float() + 1) / self.length
        return (q * (1 + share)[:, :, None, None] ** self.exponent).to(q.dtype)
