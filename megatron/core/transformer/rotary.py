"""Rotary position embedding (arXiv:2104.09864), which rotates pairs of channels. The two channels of a pair are either
adjacent, or rotary_dim / 2 channels apart.

The frequencies can be scaled as in Llama 3.1 or YaRN, or computed as if the whole head were rotated (--rope-type
proportional). Position interpolation is also supported.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.config.layers import Rotation
from megatron.core.config.model import TransformerConfig


def rotary_frequencies(config: TransformerConfig, rotation: Rotation) -> Tensor:
    """Return the frequency of each channel pair in radians per position, [rotary_dim / 2] fp32. With --rope-type
    proportional, the result includes the pairs that are not rotated, which have the frequency 0.

    Position interpolation divides the positions by a factor (arXiv:2306.15595, section 2.3). This function divides the
    frequencies by the factor, which is equivalent.
    """
    channels = config.rotated_channels(rotation)
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies = 1.0 / (rotation.base**exponents)
    if not rotation.scaled:
        return frequencies
    if config.rotary_type == "proportional":
        frequencies = _proportional_frequencies(config, rotation)
    if config.use_rope_scaling:
        frequencies = _scale_frequencies(frequencies, config)
    if config.yarn:
        frequencies = _yarn_frequencies(frequencies, channels, rotation.base, config)
    return frequencies / (config.rotary_seq_len_interpolation_factor or 1.0)


def _proportional_frequencies(config: TransformerConfig, rotation: Rotation) -> Tensor:
    """Return the frequencies of all channel pairs of a head. The frequencies are computed as if the whole head were
    rotated, and are then set to 0 for the pairs that are not rotated."""
    channels = config.rotated_channels(replace(rotation, percent=1))
    pairs = torch.arange(channels // 2, dtype=torch.float32)
    frequencies = 1.0 / (rotation.base ** (2 * pairs / channels))
    return torch.where(pairs < channels * rotation.percent // 2, frequencies, 0.0)


def _yarn_frequencies(frequencies: Tensor, channels: int, base: float, config: TransformerConfig) -> Tensor:
    """Divide low frequencies by the scaling factor, keep high frequencies, and interpolate linearly in between (YaRN,
    arXiv:2309.00071, section 3.2).

    As in most published models, the bounds of the interpolated range are rounded to whole channel pairs.
    --no-yarn-correction-range-round-to-int disables this rounding.
    """

    def pair(rotations: float) -> float:
        """Return the fractional index of the channel pair that makes `rotations` rotations within the original context
        length."""
        wavelengths = config.original_max_position_embeddings / (2 * math.pi * rotations)
        return channels * math.log(wavelengths) / (2 * math.log(base))

    first, last = pair(config.beta_fast), pair(config.beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32)
    share_slowed = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequencies / config.rotary_scaling_factor * share_slowed + frequencies * (1 - share_slowed)


def _scale_frequencies(frequencies: Tensor, config: TransformerConfig) -> Tensor:
    """Divide low frequencies by the scaling factor, keep high frequencies, and interpolate linearly in between.

    The scaling is the same as in Llama 3.1. A frequency is low if the ratio of the original context length to its
    wavelength is less than `rope_scaling_low_freq_factor`, and high if the ratio exceeds
    `rope_scaling_high_freq_factor`.
    """
    original = config.rope_scaling_original_max_position_embeddings
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / config.rope_scaling_factor
    share_kept = (original / wavelengths - low) / (high - low)
    blended = (1 - share_kept) * slowed + share_kept * frequencies
    scaled = torch.where(wavelengths > original / low, slowed, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


class RotaryEmbedding:
    """Rotary embedding that computes the cosines and sines of the angles position * frequency. With YaRN, the cosines
    and sines are also multiplied by the YaRN attention factor.

    The angles are always computed in fp32, as in the training and inference of published models.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, dtype: torch.dtype, rotation: Rotation) -> None:
        self.frequencies = rotary_frequencies(config, rotation).to(device)
        self.mscale = config.rotary_mscale if rotation.scaled else 1.0
        self.dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines for the given positions: positions [s] or [b, s] -> two tensors [s, 1 or b,
        1, rotary_dim / 2]. The dim of size 1 is broadcast over the heads."""
        positions = positions[None] if positions.ndim == 1 else positions
        angles = positions.t()[:, :, None].float() * self.frequencies  # angles [s, 1 or b, rotary_dim / 2]
        cos, sin = ((table * self.mscale).to(self.dtype).unsqueeze(2) for table in (angles.cos(), angles.sin()))
        return cos, sin


def query_scales(config: TransformerConfig, positions: Tensor) -> Tensor:
    """Compute the factors by which queries are multiplied (--attention-temperature-coeff): positions [s] or [b, s] ->
    fp32 tensor [s, 1 or b, 1, 1]. The factors grow with the position, so that attention without rotary embedding stays
    sharp over long contexts.
    """
    positions = positions[None] if positions.ndim == 1 else positions
    first = 0 if config.attention_temperature_everywhere else 1
    steps = ((positions.t().float() + first) / config.attention_temperature_floor).floor()
    return (1 + config.attention_temperature_coeff * steps.log1p())[:, :, None, None]


def scaled_queries(q: Tensor, scales: Tensor) -> Tensor:
    """Multiply the queries q [s, b, heads, d] by `scales`, which is the result of `query_scales`."""
    return (q * scales).to(q.dtype)


def rotate_queries_and_keys(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in pairs of channels i and i + rotary_dim / 2. `cos` and `sin` are the results of
    `RotaryEmbedding` for the tokens' positions."""
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)


def rotate_queries_and_keys_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in pairs of adjacent channels 2i and 2i + 1."""
    return apply_rotary_interleaved(q, cos, sin), apply_rotary_interleaved(k, cos, sin)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_dim channels of x [s, b, heads, head_dim] in pairs of channels i and i + rotary_dim /
    2."""
    half = cos.shape[-1]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def apply_rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_dim channels of x [s, b, heads, head_dim] in pairs of channels 2i and 2i + 1."""
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)
