"""Attention and Mamba-2 in parallel, as in Falcon-H1 (arXiv 2507.22448, section 2)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext
from megatron.extensions.mixers.mamba.flags import NAME as MAMBA2
from megatron.extensions.mixers.parallel_mixers.flags import ParallelMixerFlags


class AttentionAndMamba2(nn.Module):
    """Mixer that sums the outputs of the model's attention and of Mamba-2. The inputs and outputs of both are
    multiplied by scale factors. The scale factor of keys is applied to the attention scores."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        own = config.options(ParallelMixerFlags)
        of_keys = replace(config, softmax_scale=config.attention_scale * own.attention_key_multiplier)
        self.attention = MIXERS.build(config.attention, f"{name}.attention", of_keys, ctx)
        self.mamba = MIXERS.build(MAMBA2, f"{name}.mamba", config, ctx)
        self.of_attention = own.attention_input_multiplier, own.attention_output_multiplier
        self.of_mamba = own.mamba_input_multiplier, own.mamba_output_multiplier

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the output for the input x. The input and the output are [s/cp, b, h], or [s/(cp*tp), b, h] under
        sequence parallelism."""
        parts = (self.attention, *self.of_attention), (self.mamba, *self.of_mamba)
        attended, mixed = (_scaled(part(_scaled(x, before), context), behind) for part, before, behind in parts)
        return attended + mixed


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
