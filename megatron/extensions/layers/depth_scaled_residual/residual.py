"""Residual stream whose additions are scaled according to their depth in the model."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext


class DepthScaledResidual(nn.Module):
    """Residual connection with the output sqrt((n - 1) / n) x + sqrt(1 / n) f(x). The stream is a weighted sum of n
    terms: the embeddings are the first term, and f(x) is the n-th term. If the terms are independent and have equal
    variance, the stream has the same variance in every layer."""

    def __init__(self, sublayer: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        number = 2 * (ctx.layer + 1) + sublayer.endswith(".mlp")
        self.of_stream, self.of_output = sqrt((number - 1) / number), sqrt(1 / number)

    @staticmethod
    def enter(x: Tensor, config: TransformerConfig) -> Tensor:
        return x

    @staticmethod
    def leave(norm: str, config: TransformerConfig, ctx: TPContext) -> nn.Module:
        return nn.Identity()

    def forward(self, x: Tensor, sublayer: Callable[[Tensor, BatchContext], Tensor], context: BatchContext) -> Tensor:
        """Return the output for the input x. The input and the output are [s, b, h], or [s/tp, b, h] under sequence
        parallelism."""
        return self.of_stream * x + self.of_output * sublayer(x, context)
