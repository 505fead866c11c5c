"""Flags of multi-latent attention, and facts about it before it is imported. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.model import TransformerConfig
from megatron.core.facts import HeadWidths
from megatron.core.parts import ATTENTIONS, RECOMPUTED_PARTS
from megatron.training.extensions import extension_flags


@extension_flags("multi-latent attention", part_of="model")
@dataclass(frozen=True)
class LatentAttentionFlags:
    """Ranks and head widths of multi-latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(
        "--multi-latent-attention", lambda config: config.model.attention == "multi_latent_attention"
    )

    multi_latent_attention: bool = flag(False, effective="attention")
    """Multi-latent attention (MLA): keys and values of all heads are projections of one narrow latent per token, and
    so are queries with --q-lora-rank. Short for --attention-module multi_latent_attention. --qk-layernorm normalizes
    the latents."""

    q_lora_rank: int | None = flag(None, above=0)
    """MLA: width of the latent of queries; default: queries are projected from the hidden states directly."""

    kv_lora_rank: int = flag(32, above=0)
    """MLA: width of the latent of keys and values."""

    qk_head_dim: int = flag(128, above=0)
    """MLA: channels of a query or key head without position."""

    qk_pos_emb_head_dim: int = flag(64, above=0)
    """MLA: channels of a query or key head with a rotary embedding; all heads share those of the key."""

    v_head_dim: int = flag(128, above=0)
    """MLA: channels of a value head."""

    mla_scale_latents: bool = False
    """MLA: multiply latents, behind their norms, by the square root of --hidden-size / their width (LongCat-Flash)."""

    latent_norm_epsilon: float | None = flag(None, above=0, no_effect_without="--qk-layernorm")
    """MLA: added to the variance in norms of latents, 1e-6 in DeepSeek-V3; default: --layernorm-epsilon."""


def widths(config: TransformerConfig) -> HeadWidths:
    """Channels of heads of multi-latent attention."""
    own = config.options(LatentAttentionFlags)
    return HeadWidths(own.qk_head_dim + own.qk_pos_emb_head_dim, own.qk_pos_emb_head_dim, own.v_head_dim)


def latents(config: TransformerConfig) -> str:
    """Widths of latents, for a plan."""
    own = config.options(LatentAttentionFlags)
    queries = f" for queries {own.q_lora_rank}," if own.q_lora_rank else ""
    return f", latents{queries} for keys and values {own.kv_lora_rank}"


ATTENTIONS.register(
    "multi_latent_attention",
    f"{__package__}.multi_latent_attention:MultiLatentAttention",
    chosen_by=lambda config: config.options(LatentAttentionFlags).multi_latent_attention,
    rules=f"{__package__}.rules:latent_attention",
    widths=widths,
    grouped=False,
    rotates=True,
    rope_type="yarn",
    scales_scores=True,
    described=latents,
    letter="+",
)
RECOMPUTED_PARTS.register(
    "mla_up_proj", lambda config: config.attention == "multi_latent_attention", needs="--multi-latent-attention"
)
