"""Parameters of gated delta nets. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ColumnLinear, RowLinear, metas_of
from megatron.core.transformer.parameters import HEAD_NORM_PARTIAL_OVER
from megatron.extensions.linear_attention.flags import LinearAttentionFlags


class DeltaNetParameters(NamedTuple):
    """Parameters of a gated delta net, in the order in which it makes them. Neither projection has a bias."""

    conv1d: ParamMeta
    """conv1d.weight [key heads, channels of query, key and values, taps]."""

    dt_bias: ParamMeta
    """dt_bias [value heads], added to the projected decay."""

    a_log: ParamMeta
    """A_log [value heads], logarithm of the decay's factor."""

    out_norm: ParamMeta
    """out_norm.weight [channels of a value head]: one for all heads."""

    in_proj: ColumnLinear
    """in_proj [key heads, channels, h], see `linear_channels`."""

    out_proj: RowLinear
    """out_proj [h, value heads * channels]."""


def delta_net_parameters(name: str, config: TransformerConfig) -> DeltaNetParameters:
    """Parameters of a gated delta net (arXiv 2412.06464, section 3.4) with Megatron-LM's names and initial values."""
    own, hidden = config.options(LinearAttentionFlags), config.hidden_size
    groups, channels, value = own.linear_num_key_heads, own.linear_channels, own.linear_value_head_dim
    heads, taps = own.linear_num_value_heads, own.linear_conv_kernel_dim
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    by_heads = {"tp": 0}
    within = Init("uniform", low=-(taps**-0.5), high=taps**-0.5)
    return DeltaNetParameters(
        ParamMeta(f"{name}.conv1d.weight", (groups, sum(channels[:3]), taps), by_heads, within, role="convolution"),
        ParamMeta(f"{name}.dt_bias", (heads,), by_heads, Init("ones")),
        ParamMeta(f"{name}.A_log", (heads,), by_heads, Init("log_of_uniform", low=1.0, high=16.0)),
        ParamMeta(f"{name}.out_norm.weight", (value,), {}, Init("ones"), HEAD_NORM_PARTIAL_OVER),
        ColumnLinear(f"{name}.in_proj", hidden, (groups, sum(channels)), False, init),
        RowLinear(f"{name}.out_proj", heads * value, hidden, False, output_init),
    )


def delta_net_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of a gated delta net."""
    return metas_of(delta_net_parameters(name, config), sequence_parallel)
