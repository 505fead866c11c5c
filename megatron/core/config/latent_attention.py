"""Configuration of multi-latent attention: fields that `TransformerConfig` inherits. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Ranks and head widths of multi-latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    multi_latent_attention: bool = False
    """Multi-latent attention (MLA): keys and values of all heads are projections of one narrow latent per token, and
    so are queries with --q-lora-rank. Short for --attention-module multi_latent_attention. --qk-layernorm normalizes
    the latents."""

    q_lora_rank: int | None = None
    """MLA: width of the latent of queries; default: queries are projected from the hidden states directly."""

    kv_lora_rank: int = 32
    """MLA: width of the latent of keys and values."""

    qk_head_dim: int = 128
    """MLA: channels of a query or key head without position."""

    qk_pos_emb_head_dim: int = 64
    """MLA: channels of a query or key head with a rotary embedding; all heads share those of the key."""

    v_head_dim: int = 128
    """MLA: channels of a value head."""
