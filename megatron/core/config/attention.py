"""Configuration fields for positions and for attention scores, gates and heads, which `TransformerConfig` inherits.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import Condition, flag

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")

TABLES = ("learned_absolute", "sinusoidal", "sinusoidal_ctrl")
"""Values of --position-embedding-type that add a position vector to the embedding of each token."""

OF_TABLES = " or ".join(f"--position-embedding-type {kind}" for kind in TABLES)
LOCAL = "--window-size or --attention-chunk-size"
ROTARY = Condition("--position-embedding-type rope", lambda config: config.model.rotary)
YARN = Condition("--rope-type yarn", lambda config: config.model.rotary and config.model.yarn)


@dataclass(frozen=True)
class RotaryConfig:
    """Settings of the position embedding: its kind, and the frequencies and scaling of a rotary embedding."""

    position_embedding_type: str = flag("learned_absolute", choices=(*TABLES, "rope", "alibi", "none"), first_run=True)
    """Position embedding: a learned table (learned_absolute), sinusoids (sinusoidal), sinusoids with the frequencies of
    CTRL (sinusoidal_ctrl), a rotary embedding (rope), linear biases of attention scores (alibi), or none."""

    position_offset: int = flag(0, at_least=0, no_effect_without=OF_TABLES)
    """Offset that is added to positions before they are looked up in the position table. A learned table has this many
    additional rows (2 in OPT)."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""

    window_rotary_base: float | None = flag(None, no_effect_without=(LOCAL, ROTARY))
    """Base of the rotary frequencies in layers with a sliding window or chunks (Gemma 3). If it is given, frequency
    scaling and interpolation do not apply to these layers. Default: the same rotary embedding as in other layers."""

    no_rope_freq: str | None = flag(None, no_effect_without=ROTARY)
    """Layers without rotary embedding. N: layers N - 1, 2N - 1, .... A list: one entry per layer, 1 for a layer without
    and 0 for a layer with rotary embedding. Default: every layer has a rotary embedding."""

    rotary_percent: float = flag(1.0, above=0, at_most=1)
    """Fraction of each head's channels that are rotated."""

    rotary_interleaved: bool = flag(False, no_effect_without=ROTARY)
    """Rotate pairs of neighbouring channels, as in GPT-J, instead of pairs of channels that are half the rotated width
    apart."""

    rotary_seq_len_interpolation_factor: float | None = flag(None, no_effect_without=ROTARY)
    """Divide positions by this number, which stretches the rotary embedding to longer sequences."""

    use_rope_scaling: bool = flag(False, no_effect_without=ROTARY)
    """Scale rotary frequencies as in Llama 3.1."""

    rope_scaling_factor: float = 8.0
    """Llama 3.1 scaling: factor by which low frequencies are divided."""

    rope_scaling_low_freq_factor: float = 1.0
    """Llama 3.1 scaling: wavelengths above original length / this value are fully scaled."""

    rope_scaling_high_freq_factor: float = 4.0
    """Llama 3.1 scaling: wavelengths below original length / this value are not scaled."""

    rope_scaling_original_max_position_embeddings: int = 8192
    """Llama 3.1 scaling: original context length."""

    rope_type: str | None = flag(
        None, choices=("rope", "yarn", "proportional"), no_effect_without=ROTARY, effective="rotary_type"
    )
    """Rotary frequencies. rope: not scaled. yarn: scaled by YaRN for longer sequences. proportional: spaced over the
    whole head, of which only the first --rotary-percent of the channel pairs are rotated (LFM3). Default: yarn for
    multi-latent attention, else rope. If --rotary-scaling-factor has its default, 1, yarn is the same as rope."""

    rotary_scaling_factor: float = flag(1.0, at_least=1, no_effect_without=YARN)
    """YaRN: length of the longest sequence, as a multiple of the original context length."""

    original_max_position_embeddings: int = flag(4096, no_effect_without=YARN)
    """YaRN: original context length."""

    beta_fast: float = flag(32.0, no_effect_without=YARN)
    """YaRN: frequencies with at least this many rotations over the original context length are not scaled."""

    beta_slow: float = flag(1.0, no_effect_without=YARN)
    """YaRN: frequencies with at most this many rotations over the original context length are fully scaled."""

    yarn_correction_range_round_to_int: bool = flag(
        True, name="--no-yarn-correction-range-round-to-int", no_effect_without=YARN
    )
    """YaRN: do not round the bounds of the channel range between --beta-fast and --beta-slow (gpt-oss)."""

    mscale: float = flag(1.0, at_least=0, no_effect_without=YARN)
    """YaRN: rotated queries and keys are multiplied by 0.1 * mscale * ln(scaling factor) + 1."""

    mscale_all_dim: float = flag(0.0, no_effect_without=YARN)
    """YaRN: like --mscale, but for all channels of queries and keys instead of only the rotated channels. The resulting
    factor scales the softmax, and is divided out of the rotated channels (DeepSeek). This flag applies only to
    multi-latent attention."""

    @property
    def position_table(self) -> bool:
        """True if a position vector is added to each token's embedding."""
        return self.position_embedding_type in TABLES

    @property
    def alibi(self) -> bool:
        """True if the ALiBi bias is added to attention scores."""
        return self.position_embedding_type == "alibi"


@dataclass(frozen=True)
class SelfAttentionConfig:
    """Settings of attention scores, gates and heads."""

    qk_layernorm: bool = False
    """Normalize queries and keys before the rotary embedding."""

    qk_layernorm_scope: str = flag("head", choices=("head", "each", "all"), no_effect_without="--qk-layernorm")
    """Channels that one norm of --qk-layernorm covers. head: the channels of one head, with a weight that all heads
    share. each: the channels of one head, with a separate weight for each head (Command R+). all: the channels of all
    heads together (OLMo 2)."""

    qk_layernorm_after_rotary: bool = flag(False, no_effect_without=("--qk-layernorm", ROTARY))
    """Normalize queries and keys after the rotary embedding instead of before it (HunYuan)."""

    clip_qkv: float | None = None
    """Clip queries, keys and values to [-c, c] before the rotary embedding, where c is this number (OLMo, DBRX,
    MPT). Default: no clipping."""

    softmax_scale: float | None = None
    """Scale factor of the attention scores; default: 1 / sqrt(head width)."""

    softmax_type: str = flag("vanilla", choices=SOFTMAX_TYPES)
    """Softmax over attention scores. vanilla: plain softmax. off-by-one: with an attention sink, which is an extra
    score of 0 in each row without a value vector. learnable: with an attention sink that each head learns (gpt-oss)."""

    attention_output_gate: bool = flag(False, excludes="--head-wise-attn-gate: both gate the same output")
    """Gate the attention output before the output projection: multiply each channel by the sigmoid of a projection
    of the layer's input (Qwen3-Next)."""

    attention_gate_function: str = flag(
        "sigmoid",
        choices=("sigmoid", "softplus"),
        no_effect_without="--attention-output-gate or --head-wise-attn-gate",
    )
    """Activation function of the attention output gate: sigmoid, or softplus (Laguna)."""

    attn_logit_softcapping: float | None = None
    """Replace each scaled attention score z by c tanh(z / c) before the mask, where c is this number (Gemma 2).
    Default: no cap."""

    head_wise_attn_gate: bool = False
    """Gate each attention head before the output projection: multiply its output by the sigmoid of a linear
    projection of the layer's input to one number per head (Step-3.5)."""

    value_channels: int | None = None
    """Width of one value head; default: the width of a query or key head, --kv-channels."""

    attention_value_scale: float = 1.0
    """Scale factor of the attention values (MiMo-V2)."""

    window_num_attention_heads: int | None = flag(None, no_effect_without=LOCAL)
    """Query heads in layers with a sliding window or chunks (Step-3.5); default: as in other layers."""

    window_num_query_groups: int | None = flag(None, no_effect_without=LOCAL)
    """Key/value heads in layers with a sliding window or chunks (MiMo-V2); default: as in other layers."""

    window_kv_channels: int | None = flag(None, no_effect_without=LOCAL)
    """Width of query and key heads in layers with a sliding window or chunks (Gemma 4); default: as in other
    layers."""

    window_softmax_type: str | None = flag(None, choices=SOFTMAX_TYPES, no_effect_without=LOCAL)
    """--softmax-type of layers with a sliding window or chunks (MiMo-V2); default: as in other layers."""

    window_rotary_percent: float | None = flag(None, above=0, at_most=1, no_effect_without=(LOCAL, ROTARY))
    """--rotary-percent of layers with a sliding window or chunks (Step-3.5); default: as in other layers."""

    qk_l2_norm: bool = flag(False, no_effect_without=ROTARY, excludes="--qk-layernorm: both normalize queries and keys")
    """Divide the queries and keys of each head by the root of their mean square, without weights, in layers with
    rotary embedding (Llama 4). Megatron-LM normalizes queries and keys in all layers."""

    attention_temperature_coeff: float = 0.0
    """Coefficient a of the attention temperature: in layers without rotary embedding, queries at position p, counted
    from 0, are multiplied by 1 + a ln(1 + floor((p + 1) / N)), where N is --attention-temperature-floor (arXiv
    2501.19399). Llama 4 uses 0.1."""

    attention_temperature_everywhere: bool = flag(False, no_effect_without="--attention-temperature-coeff")
    """Apply the attention temperature in all layers, with the factor 1 + a ln(1 + floor(p / N)) (Ministral 3)."""

    attention_temperature_floor: int = flag(8192, no_effect_without="--attention-temperature-coeff")
    """The number N in the formula for --attention-temperature-coeff. Queries at positions below N - 1 are not
    scaled."""
