"""Dense head: a norm, a linear layer and a GELU between the last layer and the final norm."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import ReplicatedParallelLinear, TPContext
from megatron.core.tensor_parallel.linear_spec import ReplicatedLinear
from megatron.core.transformer.norm import build_norm


class PlainResidual(nn.Module):
    """Plain residual stream that applies the dense head after the last layer."""

    def __init__(self, sublayer: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()

    @staticmethod
    def enter(x: Tensor, config: TransformerConfig) -> Tensor:
        return x

    @staticmethod
    def leave(norm: str, config: TransformerConfig, ctx: TPContext) -> nn.Module:
        return DenseHead(norm, config, ctx)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor, BatchContext], Tensor], context: BatchContext) -> Tensor:
        """Return the output for the input x. The input and the output are [s, b, h], or [s/tp, b, h] under sequence
        parallelism."""
        return x + sublayer(x, context)


class DenseHead(nn.Module):
    """Module that computes gelu(linear(norm(x))), where x is the output of the last layer. The final norm of the model
    is applied to the result. The linear layer is replicated on all tensor-parallel ranks."""

    def __init__(self, norm: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        name, hidden = f"{norm.rpartition('.')[0]}.dense_head", config.hidden_size
        self.layernorm = build_norm(f"{name}.layernorm", hidden, config, ctx)
        self.linear = ReplicatedParallelLinear(ReplicatedLinear(f"{name}.linear", hidden, hidden, False), ctx)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the input x. The input and the output are [s, b, h], or [s/tp, b, h] under sequence
        parallelism."""
        return F.gelu(self.linear(self.layernorm(x)))
