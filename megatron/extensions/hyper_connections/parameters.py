"""Parameters of hyper-connections, with the names and initial values of Megatron-LM's branch dev. No torch."""

from __future__ import annotations

from math import sqrt

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import sequence_partial
from megatron.extensions.hyper_connections.flags import HyperConnectionFlags


def connection_metas(sublayer: str, config: TransformerConfig, sequence_parallel: bool) -> list[ParamMeta]:
    """mapping_proj.weight [n + n + n * n, n * h], the factors alpha_pre, alpha_post and alpha_res, and the bias: of the
    weights that a sublayer reads by, of those of its output, and of the mixing matrix."""
    own, width = config.options(HyperConnectionFlags), config.residual_size
    rows = own.mhc_num_residual_streams * (own.mhc_num_residual_streams + 2)
    bound, name = sqrt(6 / (rows + width)), f"{sublayer}_hyper_connection"
    factor = Init("constant", value=own.mhc_init_gating_factor)
    partial_over = sequence_partial(sequence_parallel)
    return [
        ParamMeta(
            f"{name}.mapping_proj.weight", (rows, width), {}, Init("uniform", low=-bound, high=bound), partial_over
        ),
        *(ParamMeta(f"{name}.alpha_{of}", (1,), {}, factor, partial_over) for of in ("pre", "post", "res")),
        ParamMeta(f"{name}.bias", (rows,), {}, Init("zeros"), partial_over),
    ]


def contract_metas(norm: str, config: TransformerConfig, sequence_parallel: bool) -> list[ParamMeta]:
    """hc_head_fn [n, n * h], hc_head_base [n] and hc_head_scale, beside the norm of this name; none for a mean. The
    scale starts at 1, as in Megatron-LM and transformers, whatever --mhc-init-gating-factor says."""
    own, name = config.options(HyperConnectionFlags), norm.rpartition(".")[0]
    if own.mhc_output_contract == "mean":
        return []
    streams, partial_over = own.mhc_num_residual_streams, sequence_partial(sequence_parallel)
    of_fn = Init("normal", config.init_method_std)
    return [
        ParamMeta(f"{name}.hc_head_fn", (streams, config.residual_size), {}, of_fn, partial_over),
        ParamMeta(f"{name}.hc_head_base", (streams,), {}, Init("zeros"), partial_over),
        ParamMeta(f"{name}.hc_head_scale", (1,), {}, Init("constant", value=1.0), partial_over),
    ]
