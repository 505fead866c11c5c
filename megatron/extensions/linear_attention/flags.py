"""Flags of gated delta nets, their rules, and facts about them before they are imported. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.model import TransformerConfig
from megatron.core.parts import LINEAR_ATTENTIONS, LINEAR_FORMATS, linear_format
from megatron.extensions.hybrid_layers.flags import has_linear_attention
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags


@extension_flags("gated delta nets", part_of="model")
@dataclass(frozen=True)
class LinearAttentionFlags:
    """The shape of gated delta nets (arXiv 2412.06464)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention("gated_delta_net", "G")

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


def delta_nets(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Rules of a model with gated delta nets."""
    own, p = c.options(LinearAttentionFlags), c.parallel
    keys, values = own.linear_num_key_heads, own.linear_num_value_heads
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    if keys > 0 and not divides(keys, values):
        rule = f"must be a multiple of --linear-num-key-heads {keys}"
        yield Problem("--linear-num-value-heads", values, rule, multiples(values, keys))
    if not divides(tp * cp, keys):
        rule, near = f"must be a multiple of --tensor-model-parallel-size {tp}", multiples(keys, tp * cp)
        if cp > 1:
            rule = f"{rule} * --context-parallel-size {cp} = {tp * cp}, as these ranks share its heads"
            near = f"{near}, or lower --context-parallel-size"
        yield Problem("--linear-num-key-heads", keys, rule, near)
    if (name := linear_format(p)) is not None and tp >= 1 and keys >= 1 and keys % tp == 0:
        yield from _aligned(c, *LINEAR_FORMATS.facts(name).alignment(p, tp))


def _aligned(c: RunConfig, alignment: int, under: str) -> Iterator[Problem]:
    """Each rank's matrices in another format must have aligned dimensions."""
    own, tp = c.options(LinearAttentionFlags), c.parallel.tensor_model_parallel_size
    keys = own.linear_num_key_heads
    values, width, step = own.linear_num_value_heads // tp, own.linear_value_head_dim, alignment * tp
    rule = f"under {under}, a rank's {{}} must be a multiple of {alignment}"
    if values * width % alignment:
        near = multiples(width, alignment // gcd(alignment, values))
        yield Problem("--linear-value-head-dim", width, rule.format(f"{values} value heads"), near)
    rows = keys // tp * sum(own.linear_channels)
    if rows % alignment:
        near = multiples(keys, lcm(step // gcd(step, sum(own.linear_channels)), tp))
        yield Problem("--linear-num-key-heads", keys, rule.format(f"{rows} rows of the projection"), near)


LINEAR_ATTENTIONS.register(
    "gated_delta_net",
    f"{__package__}.gated_delta_net:GatedDeltaNet",
    parameters=f"{__package__}.parameters:delta_net_metas",
    rules=f"{__name__}:delta_nets",
    described=heads,
    letter="G",
    whole_sequences=True,
)
