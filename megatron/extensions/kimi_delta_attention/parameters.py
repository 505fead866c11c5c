"""Parameters of Kimi Delta Attention. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ColumnLinear, ReplicatedLinear, RowLinear, metas_of
from megatron.core.transformer.parameters import HEAD_NORM_PARTIAL_OVER
from megatron.extensions.kimi_delta_attention.flags import KimiDeltaFlags


class KimiDeltaParameters(NamedTuple):
    """Parameters of a layer, in the order in which it makes them. No projection has a bias."""

    conv1d: ParamMeta
    """conv1d.weight [heads, channels of query, key and value, taps]."""

    dt_bias: ParamMeta
    """dt_bias [heads, channels], added to the projected decay."""

    a_log: ParamMeta
    """A_log [heads], logarithm of the decay's factor."""

    out_norm: ParamMeta
    """out_norm.weight [channels]: one for all heads."""

    in_proj: ColumnLinear
    """in_proj [heads, 3 * channels + 1, h]: query, key, value and writing strength of a head, then of the next one."""

    f_a_proj: ReplicatedLinear
    """f_a_proj [channels, h], of decays."""

    g_a_proj: ReplicatedLinear
    """g_a_proj [channels, h], of gates of outputs."""

    f_b_proj: ColumnLinear
    """f_b_proj [heads, channels, channels]."""

    g_b_proj: ColumnLinear
    """g_b_proj [heads, channels, channels]."""

    out_proj: RowLinear
    """out_proj [h, heads * channels]."""


def kimi_delta_parameters(name: str, config: TransformerConfig) -> KimiDeltaParameters:
    """Parameters of Kimi Delta Attention (arXiv 2510.26692, section 4) with the initial values of Hugging Face."""
    own, hidden = config.options(KimiDeltaFlags), config.hidden_size
    heads, width, taps = own.kda_num_heads, own.kda_head_dim, own.kda_conv_kernel_dim
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    by_heads, within = {"tp": 0}, Init("uniform", low=-(taps**-0.5), high=taps**-0.5)

    def down(of: str) -> ReplicatedLinear:
        return ReplicatedLinear(f"{name}.{of}_a_proj", hidden, width, False, init)

    def up(of: str) -> ColumnLinear:
        return ColumnLinear(f"{name}.{of}_b_proj", width, (heads, width), False, init)

    return KimiDeltaParameters(
        ParamMeta(f"{name}.conv1d.weight", (heads, 3 * width, taps), by_heads, within, role="convolution"),
        ParamMeta(f"{name}.dt_bias", (heads, width), by_heads, Init("inverse_softplus", low=1e-3, high=0.1)),
        ParamMeta(f"{name}.A_log", (heads,), by_heads, Init("log_of_uniform", low=1.0, high=16.0)),
        ParamMeta(f"{name}.out_norm.weight", (width,), {}, Init("ones"), HEAD_NORM_PARTIAL_OVER),
        ColumnLinear(f"{name}.in_proj", hidden, (heads, 3 * width + 1), False, init),
        *(down("f"), down("g"), up("f"), up("g")),
        RowLinear(f"{name}.out_proj", heads * width, hidden, False, output_init),
    )


def kimi_delta_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of a layer."""
    return metas_of(kimi_delta_parameters(name, config), sequence_parallel)
