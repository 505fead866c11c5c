"""Flags of gated delta nets, and what is known of them before they are imported. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.model import TransformerConfig
from megatron.core.parts import LINEAR_ATTENTIONS
from megatron.training.extensions import extension_flags


@extension_flags("gated delta nets", part_of="model")
@dataclass(frozen=True)
class LinearAttentionFlags:
    """The shape of gated delta nets (arXiv 2412.06464)."""

    NO_EFFECT_WITHOUT: ClassVar = "--experimental-attention-variant"

    linear_conv_kernel_dim: int = flag(4, above=0)
    """Gated delta net: tokens that the convolution of queries, keys and values spans, its own included."""

    linear_key_head_dim: int = flag(128, above=0)
    """Gated delta net: channels of a query or key head."""

    linear_value_head_dim: int = flag(128, above=0)
    """Gated delta net: channels of a value head."""

    linear_num_key_heads: int = flag(16, above=0)
    """Gated delta net: key heads, and as many query heads."""

    linear_num_value_heads: int = flag(32, above=0)
    """Gated delta net: value heads, of which each key head has equally many."""

    @property
    def linear_channels(self) -> tuple[int, int, int, int, int, int]:
        """Channels that a gated delta net projects for each key head: query, key, values, gates of the values, and for
        each value head a writing strength beta and a decay."""
        heads = self.linear_num_value_heads // self.linear_num_key_heads
        key, value = self.linear_key_head_dim, self.linear_value_head_dim
        return key, key, heads * value, heads * value, heads, heads


def heads(config: TransformerConfig) -> str:
    """Heads of gated delta nets, for a plan."""
    own = config.options(LinearAttentionFlags)
    keys = f", {own.linear_num_key_heads} key heads of {own.linear_key_head_dim}"
    return f"{keys}, {own.linear_num_value_heads} value heads of {own.linear_value_head_dim}"


LINEAR_ATTENTIONS.register(
    "gated_delta_net",
    f"{__package__}.gated_delta_net:GatedDeltaNet",
    parameters=f"{__package__}.parameters:delta_net_metas",
    rules=f"{__package__}.rules:delta_nets",
    described=heads,
    whole_sequences=True,
)
