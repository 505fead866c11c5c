"""Configuration of positions and of rotary embeddings: fields that `TransformerConfig` inherits. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag


@dataclass(frozen=True)
class RotaryConfig:
    """How positions enter: the kind of embedding, and the rotary one's frequencies and scaling."""

    position_embedding_type: str = flag("learned_absolute", choices=("learned_absolute", "rope", "alibi", "none"))
    """Position embedding: a learned table, rotary (rope), linear biases of attention scores (alibi), or none."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""

    window_rotary_base: float | None = None
    """Base of the rotary frequencies in layers with a sliding window or chunks, where they are then not scaled or
    interpolated (Gemma 3); default: the same rotary embedding as in other layers."""

    no_rope_freq: str | None = None
    """Layers without rotary embedding: N for layers N - 1, 2N - 1, ..., or a list of 1 (without) and 0 for all layers.
    Default: every layer has it."""

    rotary_percent: float = flag(1.0, above=0, at_most=1)
    """Fraction of each head's channels that are rotated."""

    rotary_interleaved: bool = False
    """Rotate pairs of neighbouring channels, as GPT-J does, instead of pairs half the rotated width apart."""

    rotary_seq_len_interpolation_factor: float | None = None
    """Divide positions by this number, which stretches the rotary embedding to longer sequences."""

    use_rope_scaling: bool = False
    """Scale rotary frequencies as in Llama 3.1."""

    rope_scaling_factor: float = 8.0
    """Llama 3.1 scaling: divisor of low frequencies."""

    rope_scaling_low_freq_factor: float = 1.0
    """Llama 3.1 scaling: wavelengths above original length / this value are fully scaled."""

    rope_scaling_high_freq_factor: float = 4.0
    """Llama 3.1 scaling: wavelengths below original length / this value are not scaled."""

    rope_scaling_original_max_position_embeddings: int = 8192
    """Llama 3.1 scaling: original context length."""

    rope_type: str | None = flag(None, choices=("rope", "yarn"))
    """Rotary frequencies: as they are (rope), or scaled to longer sequences by YaRN (yarn). Default: yarn for
    multi-latent attention, else rope. With --rotary-scaling-factor 1, the default, both are the same."""

    rotary_scaling_factor: float = flag(1.0, at_least=1)
    """YaRN: longest sequence, as a multiple of the original context length."""

    original_max_position_embeddings: int = 4096
    """YaRN: original context length."""

    beta_fast: float = 32.0
    """YaRN: frequencies with at least this many rotations over the original context length are not scaled."""

    beta_slow: float = 1.0
    """YaRN: frequencies with at most this many rotations over the original context length are fully scaled."""

    yarn_correction_range_round_to_int: bool = flag(True, name="--no-yarn-correction-range-round-to-int")
    """YaRN: leave the bounds of the pairs of channels between both unrounded, as gpt-oss does."""

    mscale: float = 1.0
    """YaRN: rotated queries and keys are multiplied by 0.1 * mscale * ln(scaling factor) + 1."""

    mscale_all_dim: float = 0.0
    """YaRN: the same of all channels of queries and keys, by the scale of the softmax, and taken out of the rotated
    ones (DeepSeek). Scales the softmax of multi-latent attention only."""
