"""Parameters of RG-LRU. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ColumnLinear, RowLinear, metas_of
from megatron.extensions.rg_lru.flags import RgLruFlags, shape_of


class RgLruParameters(NamedTuple):
    """Parameters of a layer. Projections have biases."""

    conv_weight: ParamMeta
    """conv1d.weight [channels, 1, taps]."""

    conv_bias: ParamMeta
    """conv1d.bias [channels]."""

    decay: ParamMeta
    """recurrent_param [channels]: the inverse softplus of a decay."""

    gates: tuple[ParamMeta, ...]
    """input_gate.weight [blocks, channels of a block, the same] and .bias [blocks, channels of a block], then those of
    recurrent_gate."""

    in_proj: ColumnLinear
    """in_proj [2, channels, h]: gates of the outputs, and inputs."""

    out_proj: RowLinear
    """out_proj [h, channels]."""


def rg_lru_parameters(name: str, config: TransformerConfig) -> RgLruParameters:
    taps, hidden, (blocks, width) = (
        config.options(RgLruFlags).rg_lru_conv_kernel_dim,
        config.hidden_size,
        shape_of(config),
    )
    channels, shared = blocks * width, {"tp": 0}
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    of_taps, of_gates = (Init("normal", (0.01 / size) ** 0.5) for size in (taps, width))
    gates = [
        meta
        for gate in ("input_gate", "recurrent_gate")
        for meta in (
            ParamMeta(f"{name}.{gate}.weight", (blocks, width, width), shared, of_gates, stacked=1),
            ParamMeta(f"{name}.{gate}.bias", (blocks, width), shared, Init("zeros")),
        )
    ]
    return RgLruParameters(
        ParamMeta(f"{name}.conv1d.weight", (channels, 1, taps), shared, of_taps, role="convolution"),
        ParamMeta(f"{name}.conv1d.bias", (channels,), shared, Init("zeros")),
        # so that a state is multiplied by 0.9 to 0.999 per token where its gate is 1/8
        ParamMeta(f"{name}.recurrent_param", (channels,), shared, Init("inverse_softplus", low=1e-3, high=0.105)),
        tuple(gates),
        ColumnLinear(f"{name}.in_proj", hidden, (2, channels), True, init, shard_dim=1),
        RowLinear(f"{name}.out_proj", channels, hidden, True, output_init),
    )


def rg_lru_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of a layer."""
    found = rg_lru_parameters(name, config)
    return metas_of((*found[:3], *found.gates, found.in_proj, found.out_proj), sequence_parallel)
