"""Registers gated delta nets, and defines their flags and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.layers import LayerKind
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.extensions.layers.hybrid_layers.flags import has_linear_attention
from megatron.extensions.layers.hybrid_layers.rules import unless_aligned, unless_shared
from megatron.training.config.problem import Problem, divides, unless_multiple
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags


@extension_flags("gated delta nets", part_of="model")
@dataclass(frozen=True)
class LinearAttentionFlags:
    """Options of gated delta nets (arXiv 2412.06464)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention("gated_delta_net", "G")

    linear_conv_kernel_dim: int = flag(4, above=0)
    """Gated delta net: kernel size, in tokens, of the causal convolution over queries, keys and values."""

    linear_key_head_dim: int = flag(128, above=0)
    """Gated delta net: channels per query or key head."""

    linear_value_head_dim: int = flag(128, above=0)
    """Gated delta net: channels per value head."""

    linear_num_key_heads: int = flag(16, above=0)
    """Gated delta net: number of key heads, which is also the number of query heads."""

    linear_num_value_heads: int = flag(32, above=0)
    """Gated delta net: number of value heads, a multiple of the number of key heads."""

    linear_allow_neg_eigval: bool = False
    """Gated delta net: let beta range up to 2 instead of 1, which allows negative eigenvalues of the state
    transition (arXiv 2411.12537, Olmo Hybrid)."""

    linear_num_householder: int = flag(1, above=0)
    """Gated delta net: number of delta-rule updates per token, each with its own key, value and beta (gated
    DeltaProduct, arXiv 2502.10297)."""

    linear_norm_epsilon: float | None = flag(None, above=0)
    """Gated delta net: epsilon of the norm of each head's output; default: --layernorm-epsilon."""

    linear_norm_placement: str | None = flag(None, choices=("pre",))
    """Gated delta net: norm placement in layers with a gated delta net (pre in Olmo Hybrid); default:
    --norm-placement."""

    @property
    def linear_channels(self) -> tuple[int, int, int, int, int, int]:
        """Numbers of channels that are projected for each key head, as a tuple of six: the query, the keys, the values,
        the gates of the value heads, the write strengths beta, and the decays (one per value head). Each token has
        `linear_num_householder` keys, which precede all values."""
        heads, steps = self.linear_num_value_heads // self.linear_num_key_heads, self.linear_num_householder
        key, value = self.linear_key_head_dim, self.linear_value_head_dim
        return key, steps * key, steps * heads * value, heads * value, steps * heads, heads


def heads(config: TransformerConfig) -> str:
    """Return the text that describes the heads of gated delta nets in a plan."""
    own = config.options(LinearAttentionFlags)
    keys = f", {own.linear_num_key_heads} key heads of {own.linear_key_head_dim}"
    several = "" if own.linear_num_householder == 1 else f", {own.linear_num_householder} keys a token"
    return f"{keys}, {own.linear_num_value_heads} value heads of {own.linear_value_head_dim}{several}"


def of_layer(config: TransformerConfig, number: int, kind: LayerKind) -> LayerKind:
    """Return a copy of the layer kind whose norm placement is --linear-norm-placement. If this flag is not set, return
    the layer kind unchanged."""
    placement = config.options(LinearAttentionFlags).linear_norm_placement
    return replace(kind, own=(*kind.own, ("norm_placement", placement))) if placement else kind


def delta_nets(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with gated delta nets."""
    own, tp = c.options(LinearAttentionFlags), c.parallel.tensor_model_parallel_size
    keys, values = ("--linear-num-key-heads", own.linear_num_key_heads), own.linear_num_value_heads
    if own.linear_num_key_heads > 0:
        yield from unless_multiple("--linear-num-value-heads", values, *keys)
    yield from unless_shared(c, *keys, "its heads")
    if divides(tp, own.linear_num_key_heads):
        width = "--linear-value-head-dim", own.linear_value_head_dim
        yield from unless_aligned(c, *width, values // max(tp, 1), "channels of value heads", cut=False)
    yield from unless_aligned(c, *keys, sum(own.linear_channels), "rows of the projection")


MIXERS.register(
    "gated_delta_net",
    f"{__package__}.gated_delta_net:GatedDeltaNet",
    rules=delta_nets,
    described=heads,
    letter="G",
    of_layer=of_layer,
    whole_sequences=True,
)
