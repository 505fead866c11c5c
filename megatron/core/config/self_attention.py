"""Configuration of attention's scores, gates and heads: fields that `TransformerConfig` inherits. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SelfAttentionConfig:
    """What attention does beside its projections and its kernel."""

    attn_logit_softcapping: float | None = None
    """Cap c of attention scores z, scaled and before the mask, which become c tanh(z / c) (Gemma 2); default: none."""
