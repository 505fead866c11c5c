"""Parameters of sparse attention: those of multi-latent attention, and its indexer's. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ReplicatedLinear, metas_of, sequence_partial
from megatron.core.transformer.parameters import norm_metas
from megatron.extensions.latent_attention.flags import LatentAttentionFlags
from megatron.extensions.latent_attention.parameters import latent_metas
from megatron.extensions.sparse_attention.flags import SparseAttentionFlags


class IndexerLinears(NamedTuple):
    """Linear layers of the indexer, with Megatron-LM's names, which every rank holds whole. None has a bias."""

    q: ReplicatedLinear
    """linear_wq_b [indexer heads * channels, q_lora_rank], or [..., h] without a latent of queries."""

    k: ReplicatedLinear
    """linear_wk [channels, h]: one key for all heads."""

    weights: ReplicatedLinear
    """linear_weights_proj [indexer heads, h]."""


def indexer_linears(name: str, config: TransformerConfig) -> IndexerLinears:
    """The linear layers of the indexer of this name."""
    own, hidden, init = config.options(SparseAttentionFlags), config.hidden_size, Init("normal", config.init_method_std)
    heads, width = own.dsa_indexer_n_heads, own.dsa_indexer_head_dim
    q_rank = config.options(LatentAttentionFlags).q_lora_rank or hidden
    return IndexerLinears(
        ReplicatedLinear(f"{name}.linear_wq_b", q_rank, heads * width, False, init),
        ReplicatedLinear(f"{name}.linear_wk", hidden, width, False, init),
        ReplicatedLinear(f"{name}.linear_weights_proj", hidden, heads, False, init),
    )


def of_key_norm(config: TransformerConfig) -> TransformerConfig:
    """The settings of the LayerNorm of the indexer's key, whatever norms the model has. Its epsilon is that of
    latents."""
    epsilon = config.options(LatentAttentionFlags).latent_norm_epsilon or config.norm_epsilon
    return replace(config, norm_epsilon=epsilon, apply_layernorm_1p=False, norm_parameters="all")


def sparse_attention_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of sparse attention."""
    yield from latent_metas(name, config, sequence_parallel)
    yield from metas_of(indexer_linears(f"{name}.indexer", config), sequence_parallel)
    width, partial_over = config.options(SparseAttentionFlags).dsa_indexer_head_dim, sequence_partial(sequence_parallel)
    yield from norm_metas(f"{name}.indexer.k_norm", width, partial_over, of_key_norm(config), bias=True)
