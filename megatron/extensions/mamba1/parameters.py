"""Parameters of Mamba-1. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ColumnLinear, RowLinear, metas_of
from megatron.extensions.mamba1.flags import Mamba1Flags, channels_of, low_rank_widths


class Mamba1Parameters(NamedTuple):
    """Parameters of a layer, with the names and initial values of Mamba. Neither projection from or to hidden states
    has a bias."""

    conv_weight: ParamMeta
    """conv1d.weight [channels, 1, taps]."""

    conv_bias: ParamMeta
    """conv1d.bias [channels]."""

    x_proj: ParamMeta
    """x_proj.weight [rank + 2 * states, channels]: step sizes, B and C."""

    dt_weight: ParamMeta
    """dt_proj.weight [channels, rank]."""

    dt_bias: ParamMeta
    """dt_proj.bias [channels], added to the projected step sizes."""

    a_log: ParamMeta
    """A_log [channels * states], logarithms of decays per step size. One dim: no matrix, which weights would decay."""

    d: ParamMeta
    """D [channels], factor of the input in the output."""

    norms: tuple[ParamMeta, ...]
    """dt_layernorm.weight [rank], b_layernorm.weight and c_layernorm.weight [states], with --mamba1-norm weighted."""

    in_proj: ColumnLinear
    """in_proj [2, channels, h]: inputs and gates."""

    out_proj: RowLinear
    """out_proj [h, channels]."""


def mamba1_parameters(name: str, config: TransformerConfig) -> Mamba1Parameters:
    own, hidden, channels = config.options(Mamba1Flags), config.hidden_size, channels_of(config)
    rank, states, _ = widths = low_rank_widths(config)
    taps, shared = own.mamba1_conv_kernel_dim, {"tp": 0}
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    of_taps, of_rank = (Init("uniform", low=-(size**-0.5), high=size**-0.5) for size in (taps, rank))
    decays = Init("constant", value=tuple(log(number) for number in range(1, states + 1)))
    norms = zip(("dt", "b", "c"), widths if own.mamba1_norm == "weighted" else (), strict=False)
    return Mamba1Parameters(
        ParamMeta(f"{name}.conv1d.weight", (channels, 1, taps), shared, of_taps, role="convolution"),
        ParamMeta(f"{name}.conv1d.bias", (channels,), shared, of_taps, role="convolution"),
        ParamMeta(f"{name}.x_proj.weight", (sum(widths), channels), {"tp": 1}, init),
        ParamMeta(f"{name}.dt_proj.weight", (channels, rank), shared, of_rank),
        ParamMeta(f"{name}.dt_proj.bias", (channels,), shared, Init("inverse_softplus", low=1e-3, high=0.1)),
        ParamMeta(f"{name}.A_log", (channels * states,), shared, decays),
        ParamMeta(f"{name}.D", (channels,), shared, Init("ones")),
        tuple(ParamMeta(f"{name}.{of}_layernorm.weight", (width,), {}, Init("ones")) for of, width in norms),
        ColumnLinear(f"{name}.in_proj", hidden, (2, channels), False, init, shard_dim=1),
        RowLinear(f"{name}.out_proj", channels, hidden, False, output_init),
    )


def mamba1_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of a layer."""
    found = mamba1_parameters(name, config)
    return metas_of((*found[:7], *found.norms, found.in_proj, found.out_proj), sequence_parallel)
