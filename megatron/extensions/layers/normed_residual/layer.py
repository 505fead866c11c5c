"""Layer in which the output of each sublayer is added to the sublayer's normalized input."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.layer import HiddenDropout, TransformerLayer
from megatron.extensions.layers.normed_residual.flags import NormedResidualFlags


class NormedResidualLayer(TransformerLayer):
    """`TransformerLayer` with a normalized residual stream, as in MiniMax-Text-01 (arXiv 2501.08313): x = norm(x), then
    x = weight * x + dropout(f(x)), for attention and MLP. The parameters are the same as in `TransformerLayer`.
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        self.residual_weight = config.options(NormedResidualFlags).residual_weight

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the output for the input x. The input and the output are [s, b, h], or [s/tp, b, h] under sequence
        parallelism."""
        if self.mixes:
            x = self._added(self.input_layernorm(x), self.self_attention, self.attention_dropout, context)
        if self.has_mlp:
            x = self._added(self.pre_mlp_layernorm(x), self.mlp, self.mlp_dropout, context)
        return x

    def _added(self, x: Tensor, sublayer: nn.Module, dropout: HiddenDropout, context: BatchContext) -> Tensor:
        return self.residual_weight * x + self._scaled(dropout(sublayer(x, context), context))
