"""Layer that averages the outputs of its shared expert and of its chosen experts."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.layer import TransformerLayer


class Half(nn.Module):
    """Module that multiplies its input by 1/2."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class MeanOfExpertsLayer(TransformerLayer):
    """`TransformerLayer` in which the output of an MoE layer is (shared expert + weighted sum of the chosen experts) /
    2 instead of the sum. An output norm, if the layer has one, is applied after the division by 2. The parameters are
    the same as in `TransformerLayer`."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        if config.layer(ctx.layer).experts:
            self.post_mlp_layernorm = nn.Sequential(Half(), self.post_mlp_layernorm)
