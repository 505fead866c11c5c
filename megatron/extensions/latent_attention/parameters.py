"""Parameters of multi-latent attention. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import (
    ColumnLinear,
    ReplicatedLinear,
    RowLinear,
    metas_of,
    sequence_partial,
)
from megatron.core.transformer.parameters import model_norm_metas, sinks_metas
from megatron.extensions.latent_attention.flags import LatentAttentionFlags


@dataclass(frozen=True)
class LatentLinears:
    """Linear layers of multi-latent attention. Only linear_proj has a bias, if outputs of attention have biases."""

    q_down: ReplicatedLinear | None
    """linear_q_down_proj; None without a latent of queries."""

    q: ColumnLinear
    """linear_q_up_proj [heads, qk_head_dim + qk_pos_emb_head_dim, q_lora_rank]; without a latent linear_q_proj
    [..., h]."""

    kv_down: ReplicatedLinear
    """linear_kv_down_proj [kv_lora_rank + qk_pos_emb_head_dim, h]: the latent, then the rotary key of all heads."""

    kv_up: ColumnLinear
    """linear_kv_up_proj [heads, qk_head_dim + v_head_dim, kv_lora_rank]: a head's key, then its value."""

    proj: RowLinear
    """linear_proj [h, heads * v_head_dim]."""

    norms: dict[str, int]
    """Name -> width of the norms of latents, if there are any."""


def latent_linears(name: str, config: TransformerConfig) -> LatentLinears:
    """The linear layers and norms of multi-latent attention (arXiv 2405.04434, equations 37 to 47)."""
    own, hidden, heads = config.options(LatentAttentionFlags), config.hidden_size, config.num_attention_heads
    q_rank, kv_rank, rotary = own.q_lora_rank, own.kv_lora_rank, own.qk_pos_emb_head_dim
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    q_name = f"{name}.linear_q_up_proj" if q_rank else f"{name}.linear_q_proj"
    kv_out = (heads, own.qk_head_dim + own.v_head_dim)
    of_output = config.add_bias_linear or config.add_attention_output_bias
    norms = {"q_layernorm": q_rank, "kv_layernorm": kv_rank} if config.qk_layernorm else {}
    return LatentLinears(
        ReplicatedLinear(f"{name}.linear_q_down_proj", hidden, q_rank, False, init) if q_rank else None,
        ColumnLinear(q_name, q_rank or hidden, (heads, config.head_dim), False, init),
        ReplicatedLinear(f"{name}.linear_kv_down_proj", hidden, kv_rank + rotary, False, init),
        ColumnLinear(f"{name}.linear_kv_up_proj", kv_rank, kv_out, False, init),
        RowLinear(f"{name}.linear_proj", config.attention_output_size, hidden, of_output, output_init),
        {f"{name}.{norm}": width for norm, width in norms.items() if width},
    )


def latent_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of multi-latent attention."""
    linears = latent_linears(name, config)
    yield from metas_of((linears.q_down, linears.q, linears.kv_down, linears.kv_up), sequence_parallel)
    for norm, width in linears.norms.items():
        yield from model_norm_metas(norm, width, sequence_partial(sequence_parallel), config)
    yield from linears.proj.metas(sequence_parallel)
    yield from sinks_metas(name, config)
