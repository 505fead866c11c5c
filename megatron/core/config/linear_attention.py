"""Configuration of linear attention: fields that `TransformerConfig` inherits. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.parts import LINEAR_ATTENTIONS


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Linear attention, the layers that have it, and the shape of gated delta nets (arXiv 2412.06464)."""

    experimental_attention_variant: str | None = flag(None, choices=LINEAR_ATTENTIONS)
    """Linear attention in the layers of --linear-attention-freq: gated_delta_net is that of Qwen3-Next. Default: every
    layer has --attention-module."""

    linear_attention_freq: str | None = None
    """Layers with linear attention beside layers with --attention-module: N for the latter in layers N - 1, 2N - 1,
    ..., or a list of 1 (linear) and 0 for all layers. Default: every layer has linear attention."""

    linear_conv_kernel_dim: int = 4
    """Gated delta net: tokens that the convolution of queries, keys and values spans, its own included."""

    linear_key_head_dim: int = 128
    """Gated delta net: channels of a query or key head."""

    linear_value_head_dim: int = 128
    """Gated delta net: channels of a value head."""

    linear_num_key_heads: int = 16
    """Gated delta net: key heads, and as many query heads."""

    linear_num_value_heads: int = 32
    """Gated delta net: value heads, of which each key head has equally many."""

    @property
    def linear_values_per_key(self) -> int:
        """Value heads of a key head of a gated delta net."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def linear_channels(self) -> tuple[int, int, int, int, int, int]:
        """Channels that a gated delta net projects for each key head: query, key, values, gates of the values, and for
        each value head a writing strength beta and a decay."""
        heads, key, value = self.linear_values_per_key, self.linear_key_head_dim, self.linear_value_head_dim
        return key, key, heads * value, heads * value, heads, heads
