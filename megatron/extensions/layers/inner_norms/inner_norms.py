"""Attention and a gated activation function whose outputs are normalized before the output projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.collectives import copy_to, reduce_from
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.transformer.self_attention import SelfAttention


class ShardedRMSNorm(nn.Module):
    """RMSNorm over channels that are sharded over tensor-parallel ranks. 16-bit inputs are normalized in fp32."""

    def __init__(self, name: str, size: int, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.size, self.tp = size, ctx.tp
        self.eps = config.norm_epsilon
        self.weight = make_parameter(ParamMeta(f"{name}.weight", (size,), {"tp": 0}, role="norm"), ctx)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [s, b, size/tp] over the channels of all tensor-parallel ranks, and multiply the result by the
        weight."""
        wide = x.float() if x.itemsize == 2 else x
        # The output of every rank depends on the sum of squares over all ranks, so the gradient of this sum must also
        # be summed over the ranks.
        squares = copy_to(reduce_from(wide.square().sum(-1, keepdim=True), self.tp), self.tp)
        return (wide * torch.rsqrt(squares / self.size + self.eps) * self.weight.to(wide.dtype)).to(x.dtype)


class NormedOutputAttention(SelfAttention):
    """`SelfAttention` that normalizes the outputs of all heads together before linear_proj."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        of_output = f"{name}.output_layernorm", config.attention_output_size
        self.output_layernorm = ShardedRMSNorm(*of_output, config, ctx)
        self.linear_proj.register_forward_pre_hook(self._normed)

    def _normed(self, linear: nn.Module, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Normalize the input of linear_proj. This method is registered as a forward pre-hook of linear_proj."""
        return self.output_layernorm(operands[0]), *operands[1:]


class NormedSquaredReGLU(nn.Module):
    """Activation function relu(gate)^2 * up, whose output is normalized over the whole width of the MLP."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.norm = ShardedRMSNorm(f"{name}.norm", config.ffn_size, config, ctx)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized activations [s, b, ffn/tp]. The input x [s, b, 2 ffn/tp] contains the gate channels,
        followed by the up channels."""
        gate, up = x.chunk(2, dim=-1)
        normed: Tensor = self.norm(gate.relu().square() * up)
        return normed
