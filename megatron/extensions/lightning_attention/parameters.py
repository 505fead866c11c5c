"""Parameters of lightning attention. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ColumnLinear, RowLinear, metas_of
from megatron.core.transformer.parameters import heads_norm_meta

EPSILON = 1e-6
"""Of the norm of outputs, whatever --norm-epsilon is, as in MiniMax-Text-01."""


class LightningParameters(NamedTuple):
    """Parameters of a layer, in the order in which it makes them. Neither projection has a bias."""

    in_proj: ColumnLinear
    """in_proj [heads, 4 * channels, h]: query, key, value and gate of a head, then of the next one."""

    norm: ParamMeta
    """norm.weight [heads * channels]."""

    out_proj: RowLinear
    """out_proj [h, heads * channels]."""


def norm_config(config: TransformerConfig) -> TransformerConfig:
    """The configuration of the norm of outputs: one over the channels of all heads."""
    return replace(config, qk_layernorm_scope="all", norm_epsilon=EPSILON)


def lightning_parameters(name: str, config: TransformerConfig) -> LightningParameters:
    heads, width, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    return LightningParameters(
        ColumnLinear(f"{name}.in_proj", hidden, (heads, 4 * width), False, init),
        heads_norm_meta(f"{name}.norm", heads, norm_config(config)),
        RowLinear(f"{name}.out_proj", heads * width, hidden, False, output_init),
    )


def lightning_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of a layer."""
    return metas_of(lightning_parameters(name, config), sequence_parallel)
