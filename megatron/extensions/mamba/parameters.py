"""Parameters of Mamba-2. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ColumnLinear, RowLinear, metas_of
from megatron.extensions.mamba.flags import MambaFlags, group_channels, num_heads

STEPS = Init("inverse_softplus", low=1e-3, high=0.1)
"""Initial step sizes, softplus(dt_bias), have uniform logarithms in this range."""


class MambaParameters(NamedTuple):
    """Parameters of a layer, in the order in which it makes them. Neither projection has a bias."""

    conv_weight: ParamMeta
    """conv1d.weight [groups, channels of x, B and C, taps]."""

    conv_bias: ParamMeta
    """conv1d.bias [groups, channels of x, B and C]."""

    dt_bias: ParamMeta
    """dt_bias [heads], added to the projected step size."""

    a_log: ParamMeta
    """A_log [heads], logarithm of the decay per step size."""

    d: ParamMeta
    """D [heads], factor of the input in the output."""

    norm: ParamMeta | None
    """norm.weight [heads * channels]; None with --no-mamba-norm."""

    in_proj: ColumnLinear
    """in_proj [groups, channels, h], see `group_channels`. Muon leaves it to --muon-scalar-optimizer, as Megatron-LM
    does."""

    out_proj: RowLinear
    """out_proj [h, heads * channels]."""


def mamba_parameters(name: str, config: TransformerConfig) -> MambaParameters:
    """Parameters of Mamba-2 with Megatron-LM's names and initial values."""
    own, hidden, heads, channels = (
        config.options(MambaFlags),
        config.hidden_size,
        num_heads(config),
        group_channels(config),
    )
    groups, taps, width = own.mamba_num_groups, own.mamba_conv_kernel_dim, heads * own.mamba_head_dim
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    mixed, by_heads = (groups, sum(channels[1:4])), {"tp": 0}
    within = Init("uniform", low=-(taps**-0.5), high=taps**-0.5)
    return MambaParameters(
        ParamMeta(f"{name}.conv1d.weight", (*mixed, taps), by_heads, within, role="convolution"),
        ParamMeta(f"{name}.conv1d.bias", mixed, by_heads, within, role="convolution"),
        ParamMeta(f"{name}.dt_bias", (heads,), by_heads, STEPS),
        ParamMeta(f"{name}.A_log", (heads,), by_heads, Init("log_of_uniform", low=1.0, high=16.0)),
        ParamMeta(f"{name}.D", (heads,), by_heads, Init("ones")),
        ParamMeta(f"{name}.norm.weight", (width,), by_heads, Init("ones")) if own.mamba_norm else None,
        ColumnLinear(f"{name}.in_proj", hidden, (groups, sum(channels)), False, init, role="packed"),
        RowLinear(f"{name}.out_proj", width, hidden, False, output_init),
    )


def mamba_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of a layer."""
    return metas_of(mamba_parameters(name, config), sequence_parallel)
