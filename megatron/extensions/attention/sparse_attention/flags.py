"""Registers sparse and compressed attention, and defines their flags and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.layers import LayerKind, Rotation, Span, layer_numbers
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.core.kernels import KERNELS
from megatron.core.tensor_parallel.linear_formats import gathered_format
from megatron.extensions.attention.latent_attention.flags import LatentAttentionFlags
from megatron.extensions.layers.hybrid_layers.flags import PATTERN
from megatron.training.config.flags import with_named
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

MLA = "multi_latent_attention"
COMPRESSED, SELECTED = "dsv4_hybrid", 4
"""Name of the attention variant with compressed keys, and the compression ratio of layers whose indexer selects among
the compressed keys."""


def has_indexer(config: RunConfig) -> bool:
    """Return True if any layer has an indexer, which selects keys."""
    with suppress(ValueError):  # other rules report an invalid layer pattern
        variants = config.model.linear_attentions
        return "dsa" in variants or (COMPRESSED in variants and SELECTED in ratios(config.model))
    return True


@extension_flags("sparse attention", part_of="model")
@dataclass(frozen=True)
class SparseAttentionFlags:
    """Indexer of DeepSeek sparse attention (DSA, DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(
        f"--experimental-attention-variant dsa or D in {PATTERN} or 4 in --csa-compress-ratios", has_indexer
    )

    dsa_indexer_n_heads: int = flag(64, above=0)
    """DSA: number of indexer query heads."""

    dsa_indexer_head_dim: int = flag(128, above=0)
    """DSA: channels per indexer head. The number of rotated channels is --qk-pos-emb-head-dim; the first channels are
    rotated, or the last channels if keys are compressed."""

    dsa_indexer_topk: int = flag(2048, above=0, may_change=True)
    """DSA: number of keys that each query attends to. A query attends to the keys with the largest indexer scores."""

    dsa_indexer_topk_freq: int = flag(1, above=0)
    """DSA: only every N-th layer has an indexer and selects keys. The other layers reuse the keys that the nearest
    earlier indexer selected (arXiv 2603.12201, GLM-5.2). Every multi-token prediction module has an indexer and selects
    keys."""

    dsa_indexer_skip_topk_offset: int = flag(
        0,
        at_least=0,
        no_effect_without=Condition(
            "--dsa-indexer-topk-freq above 1", lambda c: c.options(SparseAttentionFlags).dsa_indexer_topk_freq > 1
        ),
    )
    """DSA: number of layers at the beginning of the model that all select keys. --dsa-indexer-topk-freq counts from the
    last of these layers, or from the first layer of the model if this number is 0."""

    dsa_indexer_loss_coeff: float = flag(0.0, at_least=0, may_change=True, keeps_saved=True, training_only=True)
    """DSA: coefficient of the indexer loss, the KL divergence of the indexer's distribution over keys from the
    attention distribution. This loss trains the indexer and no other parameters. If the coefficient is 0, the indexer
    is not trained."""

    dsa_indexer_use_sparse_loss: bool = flag(False, may_change=True, training_only=True)
    """DSA: compute the indexer loss over the selected keys only, instead of over all keys that a query may attend
    to."""


@extension_flags("compressed attention", resolve=f"{__name__}:with_head_dim", part_of="model")
@dataclass(frozen=True)
class CompressedAttentionFlags:
    """Compressed attention of DeepSeek-V4 (--experimental-attention-variant dsv4_hybrid)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(
        f"--experimental-attention-variant {COMPRESSED}",
        lambda config: config.model.experimental_attention_variant == COMPRESSED,
    )

    csa_compress_ratios: str | None = None
    """Compressed attention: list with the number of tokens per compressed key in each layer, such as
    "([0]*2+[4,128]*20)". In a layer with number 0, queries attend only to the last tokens. In a layer with number 4,
    each compressed key covers two windows of 4 tokens, and an indexer selects keys (CSA). In a layer with any other
    number, queries attend to all earlier compressed keys (HCA). The list may also contain entries for multi-token
    prediction modules; by default, these modules use the last layer's entry."""

    csa_window_size: int = flag(128, above=0)
    """Compressed attention: number of most recent tokens that a query attends to in addition to compressed keys. The
    token of the query itself is one of them."""

    csa_compress_rotary_base: float = flag(40000.0, above=0, keeps_saved=True)
    """Compressed attention: base of the rotary frequencies in layers with compressed keys, 160000 in DeepSeek-V4.
    Layers without compressed keys use --rotary-base, without YaRN."""

    o_groups: int = flag(8, above=0)
    """Compressed attention: number of head groups. The head outputs of each group are projected separately to
    --o-lora-rank channels; the output projection then combines all groups."""

    o_lora_rank: int = flag(1024, above=0)
    """Compressed attention: width to which the outputs of each head group are projected."""


def ratios(config: TransformerConfig) -> tuple[int, ...]:
    """Return the compression ratio of each layer and multi-token prediction module. Raise ValueError if
    --csa-compress-ratios is invalid or too short."""
    found, layers = listed_ratios(config), config.num_layers
    if len(found) < layers:
        raise ValueError(f"the list must have a number for each of {layers} layers, but has {len(found)} entries")
    return (*found, *found[layers - 1 : layers] * config.mtp_depths)[: layers + config.mtp_depths]


def listed_ratios(config: TransformerConfig) -> tuple[int, ...]:
    """Parse --csa-compress-ratios and return its numbers. Raise ValueError if the value is not a valid list."""
    return layer_numbers(config.options(CompressedAttentionFlags).csa_compress_ratios or "", None, least=0)


def of_layer(config: TransformerConfig, number: int, kind: LayerKind) -> LayerKind:
    """Return a copy of the layer kind with the rotary embedding and the attention range of layer `number`. The
    attention range is the sliding window. Compressed keys are not included in the range, because there are few
    compressed keys."""
    own, ratio = config.options(CompressedAttentionFlags), 0
    with suppress(ValueError):
        ratio = ratios(config)[number]
    base = own.csa_compress_rotary_base if ratio else config.rotary_base
    rotation = Rotation(base, scaled=ratio > 0, percent=config.rotary_percent)
    return replace(kind, rotation=rotation, span=Span(own.csa_window_size))


def selects(config: TransformerConfig, number: int) -> bool:
    """Return True if layer `number` has an indexer. A layer without an indexer reuses the keys that the nearest earlier
    indexer selected. Multi-token prediction modules always have an indexer."""
    own = config.options(SparseAttentionFlags)
    since = max(number + 1 - max(own.dsa_indexer_skip_topk_offset, 1), 0)
    return number >= config.num_layers or since % own.dsa_indexer_topk_freq == 0


def indexer(config: TransformerConfig) -> str:
    """Return the text that describes the indexer in a plan."""
    own = config.options(SparseAttentionFlags)
    heads = f"{own.dsa_indexer_n_heads} indexer heads of {own.dsa_indexer_head_dim}"
    found = f", {own.dsa_indexer_topk} keys for each query by {heads}"
    return found + (f", selected by one layer in {own.dsa_indexer_topk_freq}" if own.dsa_indexer_topk_freq > 1 else "")


def compressed_keys(config: TransformerConfig) -> str:
    """Return the text that describes the attention windows and compressed keys in a plan."""
    window, kinds = config.options(CompressedAttentionFlags).csa_window_size, {*ratios(config)} - {0}
    found = f", windows of {window}" + "".join(f", keys of {ratio} tokens" for ratio in sorted(kinds))
    return found + (indexer(config) if SELECTED in kinds else "")


def has_loss(c: RunConfig) -> bool:
    """Return True if the indexer loss is computed and logged."""
    return has_indexer(c) and c.options(SparseAttentionFlags).dsa_indexer_loss_coeff > 0


VARIANT = "--experimental-attention-variant"


def with_head_dim(config: RunConfig) -> RunConfig:
    """Set --qk-head-dim such that keys and values of compressed attention have the same width, as in Megatron-LM. The
    widths must be equal because the keys serve as values. If --qk-head-dim differs from its default, the configuration
    is returned unchanged."""
    latent = config.options(LatentAttentionFlags)
    width = latent.v_head_dim - latent.qk_pos_emb_head_dim
    compressed = config.model.experimental_attention_variant == COMPRESSED
    derived = compressed and config.model.attention == MLA and width > 0
    if not derived or latent.qk_head_dim != LatentAttentionFlags.qk_head_dim:
        return config
    return with_named(config, {"qk_head_dim": width})


class KeySet(NamedTuple):
    """Size of one set of keys that a layer attends to: recent tokens, selected keys, or compressed keys."""

    most: int
    """Largest number of keys that a query attends to."""
    tokens: int = 1
    """Tokens per key."""
    window: int | None = None
    """Number of most recent tokens that a query attends to; None for all tokens up to the query's own token."""
    selects: bool = False


class SparseShape(NamedTuple):
    """Tensor sizes of attention to selected keys, for one layer on one rank."""

    length: int
    """Tokens per sample. Context parallelism gathers the keys of all these tokens."""
    heads: int
    width: int
    """Number of channels per key. The first `values` channels of a key are also its value."""
    values: int
    sets: tuple[KeySet, ...]
    sinks: bool


def sparse_shapes(config: RunConfig) -> list[SparseShape]:
    """Return the `SparseShape` of each kind of layer in a run."""
    model, own = config.model, config.options(SparseAttentionFlags)
    latent, variants = config.options(LatentAttentionFlags), set(config.model.linear_attentions)
    length, heads = model.seq_length, model.num_attention_heads // config.parallel.tensor_model_parallel_size
    found = list[SparseShape]()
    if "dsa" in variants:
        keys = KeySet(min(own.dsa_indexer_topk, length), selects=True)
        width = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        found.append(SparseShape(length, heads, width, latent.kv_lora_rank, (keys,), False))
    if COMPRESSED in variants:
        near = config.options(CompressedAttentionFlags).csa_window_size
        for ratio in sorted({*ratios(model)}):
            sets = [KeySet(min(near, length), window=near)]
            count = length // ratio if ratio else 0
            if count:
                some = ratio == SELECTED
                sets.append(KeySet(min(own.dsa_indexer_topk, count) if some else count, ratio, selects=some))
            sinks = model.softmax_type != "vanilla"
            found.append(SparseShape(length, heads, model.head_dim, model.head_dim, tuple(sets), sinks))
    return found


def untrained_indexer(c: RunConfig) -> Iterator[Problem]:
    """Report a problem if the model has an indexer, but the indexer loss that would train it is disabled."""
    if has_indexer(c) and not has_loss(c) and not c.training.skip_train:
        coeff, rule = c.options(SparseAttentionFlags).dsa_indexer_loss_coeff, "leaves the indexer untrained"
        remedy = "add --dsa-indexer-loss-coeff 1 to train it"
        yield Problem("--dsa-indexer-loss-coeff", coeff, rule, remedy, harmless=True)


def sparse_attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with sparse attention."""
    m = c.model
    own = c.options(SparseAttentionFlags)
    name = "--experimental-attention-variant"
    shown = "dsa" if m.experimental_attention_variant == "dsa" else None
    name = name if shown else "D in --hybrid-layer-pattern"
    if m.attention != MLA:
        yield Problem(name, shown, "needs the latents of --multi-latent-attention", "add --multi-latent-attention")
    for other, given, why in (
        (f"--attention-dropout {m.attention_dropout:g}", m.attention_dropout, "it does not support dropout"),
        (f"--softmax-type {m.softmax_type}", m.softmax_type != "vanilla", "it does not support sinks"),
        (f"--attn-logit-softcapping {m.attn_logit_softcapping}", m.attn_logit_softcapping, "it does not cap scores"),
        (f"--window-size {m.window_size}", m.window_size, "the indexer selects among all earlier keys"),
        (
            f"--attention-chunk-size {m.attention_chunk_size}",
            m.attention_chunk_size,
            "the indexer selects among all earlier keys",
        ),
        ("--fp8-param-gather", gathered_format(c.parallel), "it needs the 16-bit weights of linear_kv_up"),
    ):
        if given:
            yield Problem.exclusive(name, shown, other, why)
    if own.dsa_indexer_topk_freq > 1:
        yield from _shared_selections(c)
    yield from untrained_indexer(c)
    if m.attention == MLA and own.dsa_indexer_head_dim < m.rotary_dim:
        rule = f"must be at least the {m.rotary_dim} channels that --qk-pos-emb-head-dim rotates"
        yield Problem("--dsa-indexer-head-dim", own.dsa_indexer_head_dim, rule, f"nearest: {m.rotary_dim}")


def _shared_selections(c: RunConfig) -> Iterator[Problem]:
    """Check that every layer that reuses selected keys is in the same pipeline stage as the layer that selected these
    keys."""
    m = c.model
    if m.vocab_size is None:
        return  # the stages depend on the vocabulary size; this rule runs again when the size is known
    try:
        from megatron.core.pipeline_parallel.layer_split import pipeline_stages  # imports torch

        stages = pipeline_stages(m, c.parallel)
        kinds = [each.linear == "dsa" for each in m.stated_layers] if m.stated_layers else m.linear_pattern
    except (ArithmeticError, AssertionError, ValueError):
        return  # another rule reports invalid stages or layer patterns
    first = (next((number for number in stage.layers if kinds[number]), None) for stage in stages)
    if not (without := [number for number in first if number is not None and not selects(m, number)]):
        return
    frequency, sparse = c.options(SparseAttentionFlags).dsa_indexer_topk_freq, kinds.index(True)
    if without[0] == sparse:
        rule = f"leaves layer {sparse}, the first layer with sparse attention, without selected keys"
        near = f"use --dsa-indexer-skip-topk-offset {sparse % frequency + 1}"
    else:
        rule = f"leaves layer {without[0]}, the first sparse layer of its pipeline stage, without selected keys"
        ends = [number for number in range(m.num_layers) if kinds[number] and selects(m, number)]
        shown = ", ".join(map(str, ends[:8])) + (", ..." if len(ends) > 8 else "")
        near = f"layers {shown} select keys: begin stages with such layers, using --pipeline-model-parallel-layout"
    yield Problem("--dsa-indexer-topk-freq", frequency, rule, near)


def compressed_attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with compressed attention."""
    m = c.model
    p = c.parallel
    own = c.options(CompressedAttentionFlags)
    latent = c.options(LatentAttentionFlags)
    text = own.csa_compress_ratios
    ranks = p.tensor_model_parallel_size
    of_index = c.options(SparseAttentionFlags)
    yield from untrained_indexer(c)
    if m.attention != MLA:
        rule = "needs the heads and the query latent of --multi-latent-attention"
        yield Problem(VARIANT, COMPRESSED, rule, "add --multi-latent-attention")
    if text is None:
        rule, example = "needs a compression ratio for each layer", f'"([4,128]*{m.num_layers // 2})"'
        yield Problem(VARIANT, COMPRESSED, rule, f"for example, add --csa-compress-ratios {example}")
    else:
        try:
            ratios(m)
            if (count := len(listed_ratios(c.model))) not in (m.num_layers, m.num_layers + m.mtp_depths):
                rule = f"has {count} numbers for {m.num_layers} layers and {m.mtp_depths} modules of --mtp-num-layers"
                yield Problem("--csa-compress-ratios", text, rule, "remove some")
        except ValueError as error:
            yield Problem("--csa-compress-ratios", text, str(error), "correct the list")
    for other, given, why in (
        (f"--attention-dropout {m.attention_dropout:g}", m.attention_dropout, "it does not support dropout"),
        (f"--attn-logit-softcapping {m.attn_logit_softcapping}", m.attn_logit_softcapping, "it does not cap scores"),
        (f"--window-size {m.window_size}", m.window_size, "--csa-window-size is the window of all layers"),
        (f"--attention-chunk-size {m.attention_chunk_size}", m.attention_chunk_size, "its layers use a sliding window"),
        (f"--linear-attention-freq {m.linear_attention_freq}", m.linear_attention_freq, "all layers use it"),
        (f"--no-rope-freq {m.no_rope_freq}", m.no_rope_freq, "compressed keys need rotary positions"),
        ("--attention-temperature-coeff", m.attention_temperature_coeff, "its queries are normalized"),
        ("--mla-scale-latents", latent.mla_scale_latents, "it has no key latent"),
        ("--dsa-indexer-topk-freq", of_index.dsa_indexer_topk_freq > 1, "every one of its indexers selects keys"),
        ("--qk-clip", any(getattr(each, "qk_clip", False) for each in c.extension_options), "norms bound the scores"),
    ):
        if given:
            yield Problem.exclusive(VARIANT, COMPRESSED, other, why)
    if latent.kv_lora_rank != LatentAttentionFlags.kv_lora_rank:
        rule = f"has no effect with {VARIANT} {COMPRESSED}, whose keys have no latent"
        yield Problem("--kv-lora-rank", latent.kv_lora_rank, rule, "remove it", harmless=True)
    if m.attention != MLA:
        return
    if m.value_head_dim != m.head_dim:
        rule = f"must be the {m.head_dim} channels of --qk-head-dim and --qk-pos-emb-head-dim: keys are values too"
        yield Problem("--v-head-dim", m.value_head_dim, rule, f"use {m.head_dim}")
    if m.yarn and m.rotary_scaling_factor > 1 and (m.mscale or m.mscale_all_dim):
        rule = "scales the rotated keys, which are also values, but nothing would undo the scaling of the outputs"
        yield Problem("--rotary-scaling-factor", m.rotary_scaling_factor, rule, "add --mscale 0 --mscale-all-dim 0")
    width = of_index.dsa_indexer_head_dim
    if has_indexer(c) and width < latent.qk_pos_emb_head_dim:
        rule = f"must be at least the {latent.qk_pos_emb_head_dim} channels of --qk-pos-emb-head-dim"
        yield Problem("--dsa-indexer-head-dim", width, rule, f"nearest: {latent.qk_pos_emb_head_dim}")
    if own.o_groups > 0 and m.num_attention_heads % own.o_groups:
        rule = f"must divide --num-attention-heads {m.num_attention_heads}"
        yield Problem("--o-groups", own.o_groups, rule, "use one of its divisors")
    elif not divides(ranks, own.o_groups):
        rule = f"must be a multiple of --tensor-model-parallel-size {ranks}, whose ranks share the groups"
        yield Problem("--o-groups", own.o_groups, rule, multiples(own.o_groups, max(ranks, 1)))


MIXERS.register(
    "dsa",
    f"{__package__}.sparse_attention:SparseAttention",
    rules=sparse_attention,
    described=indexer,
    letter="D",
    whole_sequences=True,
    attends=True,
)
MIXERS.register(
    COMPRESSED,
    f"{__package__}.compressed_attention:CompressedAttention",
    rules=compressed_attention,
    described=compressed_keys,
    whole_sequences=True,
    attends=True,
    of_layer=of_layer,
)
CALLBACKS.register("indexer loss", f"{__package__}.hooks:IndexerLoss", when=has_loss)
for _operation, _kernel in {
    "attend_to_selected": "attention:ATTEND",
    "selected_attention_gradients": "attention:GRADIENTS",
    "attended_weights": "attention:WEIGHTS",
    "scores_of_keys": "selection:SCORES",
    "largest_scores": "selection:LARGEST",
    "keys_of_chunks": "selection:KEYS",
    "divergence": "divergence:DIVERGENCE",
}.items():
    KERNELS.register(_operation, f"{__package__}.kernels.{_kernel}")
