"""Registers layers with attention and Mamba-2 in parallel, and defines their flags.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.mixers import MIXERS
from megatron.extensions.layers.hybrid_layers.flags import has_linear_attention
from megatron.extensions.mixers.mamba.flags import NAME as MAMBA2
from megatron.training.extensions import extension_flags

NAME = "attention_and_mamba2"


@extension_flags("attention beside Mamba-2", part_of="model")
@dataclass(frozen=True)
class ParallelMixerFlags:
    """Scale factors in layers with attention and Mamba-2 in parallel (Falcon-H1, arXiv 2507.22448)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention(NAME, "H")

    attention_input_multiplier: float = 1.0
    """Parallel attention and Mamba-2: scale factor of the attention input."""

    attention_key_multiplier: float = 1.0
    """Parallel attention and Mamba-2: scale factor of the keys, and therefore of attention scores."""

    attention_output_multiplier: float = 1.0
    """Parallel attention and Mamba-2: scale factor of the attention output."""

    mamba_input_multiplier: float = 1.0
    """Parallel attention and Mamba-2: scale factor of the Mamba-2 input."""

    mamba_output_multiplier: float = 1.0
    """Parallel attention and Mamba-2: scale factor of the Mamba-2 output."""


MIXERS.register(
    NAME,
    f"{__package__}.parallel_mixers:AttentionAndMamba2",
    letter="H",
    whole_sequences=True,
    attends=True,
    includes=(MAMBA2,),
)
