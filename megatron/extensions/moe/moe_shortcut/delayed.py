"""Residual stream for shortcut-connected experts (ScMoE, arXiv 2404.05019; LongCat-Flash).

The stream [s, b, 2h] consists of the hidden states and the output of the previous layer's routed experts. The output of
a layer's routed experts is added to the hidden states only after the MLP of the next layer. Tokens do not depend on
each other, so no additional communication is needed under any layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext


class DelayedExperts(nn.Module):
    """Residual stream that adds the output of routed experts to the hidden states only after the next layer's MLP. The
    outputs of attention, dense MLPs and shared experts are added without this delay."""

    def __init__(self, sublayer: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.is_mlp = sublayer.endswith(".mlp")

    @staticmethod
    def enter(x: Tensor, config: TransformerConfig) -> Tensor:
        """Return the stream [s, b, 2h] for the embeddings x [s, b, h]."""
        return F.pad(x, (0, config.hidden_size))

    @staticmethod
    def leave(norm: str, config: TransformerConfig, ctx: TPContext) -> nn.Module:
        return SumOfBoth()

    def forward(
        self, stream: Tensor, sublayer: Callable[[Tensor, BatchContext], Tensor], context: BatchContext
    ) -> Tensor:
        """Apply the sublayer to the stream, and return the updated stream. The old and the updated stream are [s, b,
        2h], or [s/tp, b, 2h] under sequence parallelism."""
        x, waiting = stream.chunk(2, dim=-1)
        y = sublayer(x, context)
        if not self.is_mlp:
            return torch.cat((x + y, waiting), dim=-1)
        if y.shape[-1] == x.shape[-1]:  # dense MLP
            return F.pad(x + y + waiting, (0, x.shape[-1]))
        now, later = y.chunk(2, dim=-1)
        return torch.cat((x + now + waiting, later), dim=-1)


class SumOfBoth(nn.Module):
    """Module that returns the hidden states after the last layer: the sum of both halves of the stream."""

    def forward(self, stream: Tensor) -> Tensor:
        """Return the hidden states [s, b, h] for the stream [s, b, 2h]. Under sequence parallelism, the first dimension
        is s/tp."""
        x, waiting = stream.chunk(2, dim=-1)
        return x + waiting
