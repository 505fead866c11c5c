"""Configuration of attention's scores, gates and heads: fields that `TransformerConfig` inherits. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True)
class SelfAttentionConfig:
    """What attention does beside its projections and its kernel."""

    attn_logit_softcapping: float | None = None
    """Cap c of attention scores z, scaled and before the mask, which become c tanh(z / c) (Gemma 2); default: none."""

    head_wise_attn_gate: bool = False
    """Multiply the output of each head of attention, before the last projection, by the sigmoid of one number, a linear
    map of the layer's input (Step-3.5)."""

    value_channels: int | None = None
    """Width of one value head; default: that of a query or key head, --kv-channels."""

    attention_value_scale: float = 1.0
    """Factor of the values (MiMo-V2)."""

    window_num_attention_heads: int | None = None
    """Query heads in layers with a sliding window or chunks (Step-3.5); default: as in other layers."""

    window_num_query_groups: int | None = None
    """Key/value heads in layers with a sliding window or chunks (MiMo-V2); default: as in other layers."""

    window_softmax_type: str | None = flag(None, choices=SOFTMAX_TYPES)
    """--softmax-type of layers with a sliding window or chunks (MiMo-V2); default: as in other layers."""

    window_rotary_percent: float | None = flag(None, above=0, at_most=1)
    """--rotary-percent of layers with a sliding window or chunks (Step-3.5); default: as in other layers."""

    qk_l2_norm: bool = False
    """Divide each head's queries and keys by the root of their mean square, without weights, in layers with rotary
    embedding (Llama 4). Megatron-LM does so in all layers."""

    attention_temperature_coeff: float = 0.0
    """In layers without rotary embedding, multiply the queries of position p, counted from 0, by 1 + this number times
    ln(1 + floor((p + 1) / N)), N being --attention-temperature-floor (arXiv 2501.19399). 0.1 in Llama 4."""

    attention_temperature_floor: int = 8192
    """N of --attention-temperature-coeff: queries of positions below N - 1 stay as they are."""
