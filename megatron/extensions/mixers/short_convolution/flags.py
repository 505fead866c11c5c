"""Registers short convolutions, and defines their flags and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.mixers import MIXERS
from megatron.extensions.layers.hybrid_layers.flags import has_linear_attention
from megatron.extensions.layers.hybrid_layers.rules import unless_aligned, unless_shared
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags


@extension_flags("short convolutions", part_of="model")
@dataclass(frozen=True)
class ShortConvolutionFlags:
    """Options of short convolutions (LFM2, arXiv 2511.23404)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention("short_convolution", "C")

    short_conv_kernel_dim: int = flag(3, above=0)
    """Short convolution: kernel size, in tokens."""

    short_conv_bias: bool = False
    """Short convolution: add biases to the convolution and to both projections."""


def convolutions(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with short convolutions."""
    yield from unless_shared(c, "--hidden-size", c.model.hidden_size, "the channels of short convolutions")
    yield from unless_aligned(c, "--hidden-size", c.model.hidden_size, 1, "channels of a short convolution")


MIXERS.register(
    "short_convolution",
    f"{__package__}.short_convolution:ShortConvolution",
    rules=convolutions,
    described=lambda config: f", of {config.options(ShortConvolutionFlags).short_conv_kernel_dim} tokens",
    letter="C",
    whole_sequences=True,
)
