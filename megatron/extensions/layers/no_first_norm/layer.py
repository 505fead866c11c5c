"""Layer that omits the norm before attention in the first layer of the model."""

from __future__ import annotations

from torch import nn

from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.layer import TransformerLayer


class NoFirstNormLayer(TransformerLayer):
    """`TransformerLayer` without a norm before attention in layer 0. Layer 0 needs no such norm, because its input
    embeddings are already normalized."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        if ctx.layer == 0 and self.mixes:
            self.input_layernorm = nn.Identity()
