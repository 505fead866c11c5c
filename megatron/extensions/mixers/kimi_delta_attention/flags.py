"""Registers Kimi Delta Attention, and defines its flags and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.extensions.layers.hybrid_layers.flags import has_linear_attention
from megatron.extensions.layers.hybrid_layers.rules import unless_aligned, unless_shared
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags


@extension_flags("Kimi Delta Attention", part_of="model")
@dataclass(frozen=True)
class KimiDeltaFlags:
    """Options of Kimi Delta Attention (arXiv 2510.26692)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention("kimi_delta_attention", "K")

    kda_num_heads: int = flag(32, above=0)
    """Kimi Delta Attention: number of heads."""

    kda_head_dim: int = flag(128, above=0)
    """Kimi Delta Attention: channels per query, key or value head, and rank of the low-rank decay and gate
    projections."""

    kda_conv_kernel_dim: int = flag(4, above=0)
    """Kimi Delta Attention: kernel size, in tokens, of the causal convolution over queries, keys and values."""

    kda_full_rank_gates: bool = False
    """Kimi Delta Attention: project decays and output gates with one full matrix each, instead of two low-rank matrices
    (Ling 3.0)."""

    kda_decay_lower_bound: float | None = flag(None, below=0)
    """Kimi Delta Attention: lower bound b of log decays. With a bound, a log decay is b sigmoid(A (x + bias)), where x
    is the projection and A is a rate (Ling 3.0 uses b = -5). By default, a log decay is -A softplus(x + bias), without
    a bound."""


def heads(config: TransformerConfig) -> str:
    """Return the text that describes the heads of Kimi Delta Attention in a plan."""
    own = config.options(KimiDeltaFlags)
    return f", {own.kda_num_heads} heads of {own.kda_head_dim}"


def kimi_delta(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with Kimi Delta Attention."""
    own = c.options(KimiDeltaFlags)
    heads, width = ("--kda-num-heads", own.kda_num_heads), own.kda_head_dim
    yield from unless_shared(c, *heads, "its heads")
    yield from unless_aligned(c, "--kda-head-dim", width, 1, "rows of the low-rank projections", cut=False)
    yield from unless_aligned(c, *heads, 3 * width + 1, "rows of the projection")


MIXERS.register(
    "kimi_delta_attention",
    f"{__package__}.kimi_delta_attention:KimiDeltaAttention",
    rules=kimi_delta,
    described=heads,
    letter="K",
    whole_sequences=True,
)
