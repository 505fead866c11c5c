"""Registers self-attention with an output bias in the last layer. This module does not import torch."""

from __future__ import annotations

from megatron.core.config.mixers import MIXERS, AttentionFacts

NAME = "biased_last_attention"

MIXERS.register(NAME, f"{__package__}.{NAME}:BiasedLastAttention", attention=AttentionFacts())
