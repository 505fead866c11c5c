"""Registers Mamba-1, and defines its flags and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.extensions.layers.hybrid_layers.flags import has_linear_attention
from megatron.extensions.layers.hybrid_layers.rules import unless_aligned, unless_shared
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

CHANNELS = "--mamba1-channels"


@extension_flags("Mamba-1", part_of="model")
@dataclass(frozen=True)
class Mamba1Flags:
    """Options of Mamba-1 (arXiv 2312.00752)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention("mamba1", "S")

    mamba1_channels: int | None = flag(None, above=0)
    """Mamba-1: number of channels, each with its own state. Default: 2 x --hidden-size."""

    mamba1_state_dim: int = flag(16, above=0)
    """Mamba-1: state size per channel."""

    mamba1_step_rank: int | None = flag(None, above=0)
    """Mamba-1: rank of the step size projection. Default: --hidden-size / 16, rounded up."""

    mamba1_conv_kernel_dim: int = flag(4, above=0)
    """Mamba-1: kernel size of the causal convolution, in tokens."""

    mamba1_norm: str = flag("none", choices=("none", "plain", "weighted"))
    """Mamba-1: type of the RMSNorms that are applied to the projected step sizes, B and C. none: no norms. plain: norms
    without weights (Falcon-Mamba). weighted: norms with weights (Jamba)."""

    mamba1_norm_epsilon: float | None = flag(None, above=0)
    """Mamba-1: epsilon of the norms of step sizes, B and C; default: --norm-epsilon."""


def channels_of(config: TransformerConfig) -> int:
    return config.options(Mamba1Flags).mamba1_channels or 2 * config.hidden_size


def low_rank_widths(config: TransformerConfig) -> tuple[int, int, int]:
    """Return three numbers of features that are projected from the channels of each token: the low-rank step sizes, B
    and C."""
    own = config.options(Mamba1Flags)
    return own.mamba1_step_rank or ceil(config.hidden_size / 16), own.mamba1_state_dim, own.mamba1_state_dim


def described(config: TransformerConfig) -> str:
    """Return the text that describes the channels of Mamba-1 in a plan."""
    rank, states, _ = low_rank_widths(config)
    return f", {channels_of(config)} channels with states of {states}, step sizes of rank {rank}"


def mamba1(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with Mamba-1."""
    own, default = c.model.options(Mamba1Flags), 2 * c.model.hidden_size
    if own.mamba1_norm == "none" and own.mamba1_norm_epsilon is not None:
        rule = "has no effect without --mamba1-norm plain or weighted"
        yield Problem("--mamba1-norm-epsilon", own.mamba1_norm_epsilon, rule, "add one of them", harmless=True)
    yield from unless_shared(c, CHANNELS, own.mamba1_channels, "the channels of Mamba-1", default)
    yield from unless_aligned(c, CHANNELS, own.mamba1_channels, 1, "channels of Mamba-1", default)


MIXERS.register(
    "mamba1",
    f"{__package__}.mamba1:Mamba1",
    rules=mamba1,
    described=described,
    letter="S",
    whole_sequences=True,
)
