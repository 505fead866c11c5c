"""Self-attention with an output bias in the last layer."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.self_attention import SelfAttention


class BiasedLastAttention(SelfAttention):
    """`SelfAttention` whose linear_proj always has a bias in the last layer. In all other layers, the flags of the
    model decide whether linear_proj has a bias."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        last = ctx.layer == config.num_layers - 1
        super().__init__(name, replace(config, add_attention_output_bias=True) if last else config, ctx)
