"""Parameters of sparse attention, which are those of multi-latent attention and of an indexer, and of compressed
attention. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ReplicatedLinear, RowLinear, metas_of, sequence_partial
from megatron.core.transformer.parameters import HEAD_NORM_PARTIAL_OVER, model_norm_metas, norm_metas, sinks_metas
from megatron.extensions.latent_attention.flags import LatentAttentionFlags
from megatron.extensions.latent_attention.parameters import LatentLinears, latent_linears, latent_metas
from megatron.extensions.sparse_attention.flags import (
    SELECTED,
    CompressedAttentionFlags,
    SparseAttentionFlags,
    ratios,
    selects,
)


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
    if not selects(config, number_in(name, config)):
        return
    yield from metas_of(indexer_linears(f"{name}.indexer", config), sequence_parallel)
    width, partial_over = config.options(SparseAttentionFlags).dsa_indexer_head_dim, sequence_partial(sequence_parallel)
    yield from norm_metas(f"{name}.indexer.k_norm", width, partial_over, of_key_norm(config), bias=True)


@dataclass(frozen=True)
class CompressorParameters:
    """Makes a compressed key of consecutive tokens, `width` channels wide. Rows come twice where keys are made of two
    windows: those of the next window's key, then those of the window's own."""

    kv: ReplicatedLinear
    """linear_wkv [rows, h]: what is averaged."""

    gate: ReplicatedLinear
    """linear_wgate [rows, h]: logits of the weights."""

    ape: ParamMeta
    """[tokens, rows]: added to the logits."""

    norm: tuple[str, int]
    """Name and width."""

    partial_over: tuple[str, ...]
    """Of what acts on whole sequences."""


def compressor_parameters(
    name: str, config: TransformerConfig, ratio: int, width: int, partial_over: tuple[str, ...]
) -> CompressorParameters:
    """Parameters of a compressor of this name (DeepSeek-V4, section 2.3)."""
    init, rows = Init("normal", config.init_method_std), width * (2 if ratio == SELECTED else 1)
    return CompressorParameters(
        ReplicatedLinear(f"{name}.linear_wkv", config.hidden_size, rows, False, init),
        ReplicatedLinear(f"{name}.linear_wgate", config.hidden_size, rows, False, init),
        ParamMeta(f"{name}.ape", (ratio, rows), {}, init, partial_over, role="convolution"),
        (f"{name}.norm", width),
        partial_over,
    )


def number_in(name: str, config: TransformerConfig) -> int:
    """The number of the layer, or of the module of multi-token prediction behind all layers, that a name begins with:
    decoder.layers.3.self_attention, mtp.layers.0. ..."""
    kind, _, number, *_ = name.split(".")
    return int(number) + (config.num_layers if kind == "mtp" else 0)


IndexParameters = tuple[ReplicatedLinear, ReplicatedLinear, CompressorParameters]
"""linear_wq_b and linear_weights_proj of an indexer, and its compressor."""


@dataclass(frozen=True)
class CompressedParameters:
    """Parameters of a layer with compressed attention, with Megatron-LM's names. Only linear_proj has a bias, if
    outputs of attention have biases."""

    ratio: int
    queries: LatentLinears
    """Of which those of queries are used."""

    kv: ReplicatedLinear
    """linear_kv_proj [channels of a head, h]: a key that is also a value, for all heads."""

    norms: dict[str, int]
    """Name -> width of the norms of the latent of queries and of keys, if there are any."""

    group: ParamMeta
    """linear_o_group_proj [groups, o_lora_rank, heads of a group * channels]."""

    proj: RowLinear
    """linear_proj [h, groups * o_lora_rank]."""

    compressor: CompressorParameters | None
    index: IndexParameters | None


def compressed_parameters(name: str, config: TransformerConfig, sequence_parallel: bool) -> CompressedParameters:
    """The parameters of the layer that the name says."""
    own, width = config.options(CompressedAttentionFlags), config.head_dim
    ratio = ratios(config)[number_in(name, config)]
    queries, rows = latent_linears(name, config), own.o_groups * own.o_lora_rank
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    of_output = config.add_bias_linear or config.add_attention_output_bias
    of_group = own.o_groups, own.o_lora_rank, config.attention_output_size // own.o_groups
    norms = {norm: size for norm, size in queries.norms.items() if norm.endswith("q_layernorm")}
    norms |= {f"{name}.kv_layernorm": width} if config.qk_layernorm else {}
    compressor, index = None, None
    if ratio:
        compressor = compressor_parameters(f"{name}.compressor", config, ratio, width, HEAD_NORM_PARTIAL_OVER)
    if ratio == SELECTED:
        linears, of_index = indexer_linears(f"{name}.indexer", config), config.options(SparseAttentionFlags)
        of_compressor = f"{name}.indexer.compressor", config, ratio, of_index.dsa_indexer_head_dim
        partial_over = sequence_partial(sequence_parallel)
        index = linears.q, linears.weights, compressor_parameters(*of_compressor, partial_over)
    return CompressedParameters(
        ratio,
        queries,
        ReplicatedLinear(f"{name}.linear_kv_proj", config.hidden_size, width, False, init),
        norms,
        ParamMeta(f"{name}.linear_o_group_proj", of_group, {"tp": 0}, init, stacked=1),
        RowLinear(f"{name}.linear_proj", rows, config.hidden_size, of_output, output_init),
        compressor,
        index,
    )


def compressed_sinks(name: str, config: TransformerConfig) -> list[ParamMeta]:
    """The sinks of compressed attention, which start at zero, as in Megatron-LM."""
    return sinks_metas(name, config, Init("zeros"))


def compressed_attention_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of compressed attention."""
    found = compressed_parameters(name, config, sequence_parallel)

    def compressor(of: CompressorParameters) -> Iterator[ParamMeta]:
        yield from metas_of((of.ape, of.kv, of.gate), sequence_parallel)
        yield from model_norm_metas(*of.norm, of.partial_over, config)

    yield from metas_of((found.queries.q_down, found.queries.q, found.kv), sequence_parallel)
    for norm, width in found.norms.items():
        yield from model_norm_metas(norm, width, sequence_partial(sequence_parallel), config)
    if found.compressor is not None:
        yield from compressor(found.compressor)
    if found.index is not None:
        *linears, of_index = found.index
        yield from metas_of(linears, sequence_parallel)
        yield from compressor(of_index)
    yield from compressed_sinks(name, config)
    yield from metas_of((found.group, found.proj), sequence_parallel)
