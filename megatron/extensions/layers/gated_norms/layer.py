"""Transformer layer with gated input norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import ReplicatedParallelLinear, TPContext
from megatron.core.tensor_parallel.linear_spec import ReplicatedLinear
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norm import build_norm
from megatron.extensions.layers.gated_norms.flags import GatedNormFlags


class GatedNorm(nn.Module):
    """Norm with a gate: y * sigmoid(W2 silu(W1 y)), where y is the output of a plain norm. The gate matrices W1 and W2
    are replicated on all tensor-parallel ranks, and each rank applies the gate to its own tokens."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        hidden, rank = config.hidden_size, config.options(GatedNormFlags).gated_norm_rank
        self.norm = build_norm(f"{name}.norm", hidden, config, ctx)
        self.gate_down = ReplicatedParallelLinear(ReplicatedLinear(f"{name}.gate_down", hidden, rank, False), ctx)
        self.gate_up = ReplicatedParallelLinear(ReplicatedLinear(f"{name}.gate_up", rank, hidden, False), ctx)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the input x. The input and the output are [s, b, h], or [s/tp, b, h] under sequence
        parallelism."""
        y: Tensor = self.norm(x)
        return y * torch.sigmoid(self.gate_up(F.silu(self.gate_down(y))))


class GatedNormLayer(TransformerLayer):
    """`TransformerLayer` with gated norms before attention and before experts. The norm before a dense MLP has no
    gate, as in A.X K2."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        kind = config.layer(ctx.layer)
        if kind.mixes:
            self.input_layernorm = GatedNorm(f"{name}.input_layernorm", config, ctx)
        if kind.experts and config.norms_apart:
            self.pre_mlp_layernorm = GatedNorm(f"{name}.pre_mlp_layernorm", config, ctx)
