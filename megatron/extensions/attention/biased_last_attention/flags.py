"""Registers self-attention with a bias in the last layer. No torch."""

from __future__ import annotations

from megatron.core.config.mixers import MIXERS, AttentionFacts

NAME = "biased_last_attention"

MIXERS.register(NAME, f"{__package__}.{NAME}:BiasedLastAttention", attention=AttentionFacts())
