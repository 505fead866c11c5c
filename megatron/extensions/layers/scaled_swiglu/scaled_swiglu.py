"""SwiGLU with factors for gates and outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.activations import FusedActivation
from megatron.extensions.layers.scaled_swiglu.flags import ScaledSwiGLUFlags


class ScaledSwiGLU:
    """Activation function silu(m gate) * n up, where m and n are the values of --swiglu-multipliers. The function
    multiplies the gate channels by m and the up channels by n, and then applies SwiGLU. Only the scaled channels are
    saved for the backward pass."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        self.of_gate, self.of_output = config.options(ScaledSwiGLUFlags).swiglu_multipliers or (1.0, 1.0)
        self.plain = FusedActivation("swiglu", ctx.compiled)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activations [..., f]. The input x [..., 2f] contains the gate channels, followed by the up
        channels."""
        gate, up = x.chunk(2, dim=-1)
        return self.plain(torch.cat((gate * self.of_gate, up * self.of_output), dim=-1))
