"""A layer without a norm before attention if it is the first one."""

from __future__ import annotations

from torch import nn

from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.layer import TransformerLayer


class NoFirstNormLayer(TransformerLayer):
    """`TransformerLayer` whose attention reads the residual stream as it is in layer 0, where the embeddings are
    normalized already. The layers after it are those of `TransformerLayer`."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        if ctx.layer == 0 and self.mixes:
            self.input_layernorm = nn.Identity()
