"""Flags of sparse and of compressed attention, and facts about both before they are imported. No torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.layers import Rotation, Span, layer_numbers
from megatron.core.config.model import TransformerConfig
from megatron.core.parts import LINEAR_ATTENTIONS
from megatron.extensions.hybrid_layers.flags import PATTERN
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

MLA = "multi_latent_attention"
COMPRESSED, SELECTED = "dsv4_hybrid", 4
"""The variant with compressed keys, and the ratio of compression of layers that select among them."""


def has_indexer(config: RunConfig) -> bool:
    """Whether some layer selects keys."""
    with suppress(ValueError):  # of patterns that other rules refuse
        variants = config.model.linear_attentions
        return "dsa" in variants or (COMPRESSED in variants and SELECTED in ratios(config.model))
    return True


@extension_flags("sparse attention", part_of="model")
@dataclass(frozen=True)
class SparseAttentionFlags:
    """The indexer of DeepSeek sparse attention (DSA, DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(
        f"--experimental-attention-variant dsa or D in {PATTERN} or 4 in --csa-compress-ratios", has_indexer
    )

    dsa_indexer_n_heads: int = flag(64, above=0)
    """DSA: query heads of the indexer."""

    dsa_indexer_head_dim: int = flag(128, above=0)
    """DSA: channels of a head of the indexer, of which --qk-pos-emb-head-dim are rotated: the first ones, of compressed
    keys the last."""

    dsa_indexer_topk: int = flag(2048, above=0)
    """DSA: keys that each query sees, those with the largest scores of the indexer."""

    dsa_indexer_topk_freq: int = flag(1, above=0)
    """DSA: only each N-th layer selects keys; those behind it see the same, and have no indexer (arXiv 2603.12201, and
    GLM-5.2). Modules of multi-token prediction select."""

    dsa_indexer_skip_topk_offset: int = flag(
        0,
        at_least=0,
        no_effect_without=Condition(
            "--dsa-indexer-topk-freq above 1", lambda c: c.options(SparseAttentionFlags).dsa_indexer_topk_freq > 1
        ),
    )
    """DSA: the first layers all select, up to this one, from which --dsa-indexer-topk-freq counts; 0 is the first layer
    too."""

    dsa_indexer_loss_coeff: float = flag(0.0, at_least=0)
    """DSA: coefficient of the indexer's loss, the divergence of its distribution over keys from that of attention. The
    indexer learns from this loss alone, and nothing else does: with 0 it does not learn."""

    dsa_indexer_use_sparse_loss: bool = False
    """DSA: compare both distributions over the selected keys, and not over all keys that a query could see."""


@extension_flags("compressed attention", resolve=f"{__package__}.rules:with_head_dim", part_of="model")
@dataclass(frozen=True)
class CompressedAttentionFlags:
    """Compressed attention of DeepSeek-V4 (--experimental-attention-variant dsv4_hybrid)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(
        f"--experimental-attention-variant {COMPRESSED}",
        lambda config: config.model.experimental_attention_variant == COMPRESSED,
    )

    csa_compress_ratios: str | None = None
    """Compressed attention: tokens for each compressed key, by layer, such as "([0]*2+[4,128]*20)". With 0, queries see
    only the last tokens. With 4, two windows of 4 tokens make a key, and an indexer selects keys (CSA); with another
    number, queries see all earlier keys (HCA). Modules of multi-token prediction may follow; by default they are like
    the last layer."""

    csa_window_size: int = flag(128, above=0)
    """Compressed attention: tokens that a query sees beside compressed keys, its own included."""

    csa_compress_rotary_base: float = flag(40000.0, above=0)
    """Compressed attention: base of the rotary frequencies of layers with compressed keys, 160000 in DeepSeek-V4.
    Others have --rotary-base, without YaRN."""

    o_groups: int = flag(8, above=0)
    """Compressed attention: groups of heads, the outputs of each of which are projected by themselves first."""

    o_lora_rank: int = flag(1024, above=0)
    """Compressed attention: channels that the outputs of a group of heads are projected to."""


def ratios(config: TransformerConfig) -> tuple[int, ...]:
    """Ratio of each layer and module of multi-token prediction. ValueError if the list cannot be read."""
    found, layers = listed_ratios(config), config.num_layers
    if len(found) < layers:
        raise ValueError(f"the list must have a number for each of {layers} layers, and has {len(found)} entries")
    return (*found, *found[layers - 1 : layers] * config.mtp_depths)[: layers + config.mtp_depths]


def listed_ratios(config: TransformerConfig) -> tuple[int, ...]:
    """The numbers of the list. ValueError if it cannot be read."""
    return layer_numbers(config.options(CompressedAttentionFlags).csa_compress_ratios or "", None, least=0)


def of_layer(config: TransformerConfig, number: int) -> dict[str, Any]:
    """The rotary embedding of a layer. The window stands for all that it sees: compressed keys are few."""
    own, ratio = config.options(CompressedAttentionFlags), 0
    with suppress(ValueError):
        ratio = ratios(config)[number]
    base = own.csa_compress_rotary_base if ratio else config.rotary_base
    rotation = Rotation(base, scaled=ratio > 0, percent=config.rotary_percent)
    return {"rotation": rotation, "span": Span(own.csa_window_size)}


def selects(config: TransformerConfig, number: int) -> bool:
    """Whether a layer, or a module of multi-token prediction, has an indexer; others see what the last one before
    them has selected."""
    own = config.options(SparseAttentionFlags)
    since = max(number + 1 - max(own.dsa_indexer_skip_topk_offset, 1), 0)
    return number >= config.num_layers or since % own.dsa_indexer_topk_freq == 0


def indexer(config: TransformerConfig) -> str:
    """The indexer, for a plan."""
    own = config.options(SparseAttentionFlags)
    heads = f"{own.dsa_indexer_n_heads} indexer heads of {own.dsa_indexer_head_dim}"
    found = f", {own.dsa_indexer_topk} keys for each query by {heads}"
    return found + (f", selected by one layer in {own.dsa_indexer_topk_freq}" if own.dsa_indexer_topk_freq > 1 else "")


def compressed_keys(config: TransformerConfig) -> str:
    """Windows and compressed keys, for a plan."""
    window, kinds = config.options(CompressedAttentionFlags).csa_window_size, {*ratios(config)} - {0}
    found = f", windows of {window}" + "".join(f", keys of {ratio} tokens" for ratio in sorted(kinds))
    return found + (indexer(config) if SELECTED in kinds else "")


def has_loss(c: RunConfig) -> bool:
    """Whether the indexer's loss is trained and logged."""
    return has_indexer(c) and c.options(SparseAttentionFlags).dsa_indexer_loss_coeff > 0


LINEAR_ATTENTIONS.register(
    "dsa",
    f"{__package__}.sparse_attention:SparseAttention",
    rules=f"{__package__}.rules:sparse_attention",
    described=indexer,
    letter="D",
    whole_sequences=True,
    attends=True,
)
LINEAR_ATTENTIONS.register(
    COMPRESSED,
    f"{__package__}.compressed_attention:CompressedAttention",
    rules=f"{__package__}.rules:compressed_attention",
    described=compressed_keys,
    whole_sequences=True,
    attends=True,
    of_layer=of_layer,
)
CALLBACKS.register("indexer loss", f"{__package__}.hooks:IndexerLoss", when=has_loss)
