"""Parameters of short convolutions. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ColumnLinear, RowLinear, metas_of
from megatron.extensions.short_convolution.flags import ShortConvolutionFlags


class ConvolutionParameters(NamedTuple):
    """Parameters of a layer, in the order in which it makes them."""

    conv_weight: ParamMeta
    """conv1d.weight [channels, 1, taps]."""

    conv_bias: ParamMeta | None
    """conv1d.bias [channels], with --short-conv-bias."""

    in_proj: ColumnLinear
    """in_proj [3, channels, h]: gates of the inputs, gates of the outputs, and inputs."""

    out_proj: RowLinear
    """out_proj [h, channels]."""


def convolution_parameters(name: str, config: TransformerConfig) -> ConvolutionParameters:
    own, hidden = config.options(ShortConvolutionFlags), config.hidden_size
    taps, bias = own.short_conv_kernel_dim, own.short_conv_bias
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    within = Init("uniform", low=-(taps**-0.5), high=taps**-0.5)
    return ConvolutionParameters(
        ParamMeta(f"{name}.conv1d.weight", (hidden, 1, taps), {"tp": 0}, within, role="convolution"),
        ParamMeta(f"{name}.conv1d.bias", (hidden,), {"tp": 0}, within, role="convolution") if bias else None,
        ColumnLinear(f"{name}.in_proj", hidden, (3, hidden), bias, init, shard_dim=1),
        RowLinear(f"{name}.out_proj", hidden, hidden, bias, output_init),
    )


def convolution_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of a layer."""
    return metas_of(convolution_parameters(name, config), sequence_parallel)
