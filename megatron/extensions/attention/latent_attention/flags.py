"""Registers multi-latent attention, and defines its flags and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.mixers import MIXERS, AttentionFacts, HeadWidths
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, LinearFormatFacts, linear_format
from megatron.training.config.problem import Problem, multiples
from megatron.training.config.rules.parallel import tokens_for_latents
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags


@extension_flags("multi-latent attention", part_of="model")
@dataclass(frozen=True)
class LatentAttentionFlags:
    """Widths of the latents and heads in multi-latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(
        "--multi-latent-attention", lambda config: config.model.attention == "multi_latent_attention"
    )

    multi_latent_attention: bool = flag(False, effective="attention")
    """Use multi-latent attention (MLA): the keys and values of all heads are projected from one narrow latent per
    token. With --q-lora-rank, the queries are also projected from a latent. Shorthand for --attention-module
    multi_latent_attention. --qk-layernorm normalizes the latents."""

    q_lora_rank: int | None = flag(None, above=0)
    """MLA: query latent width. By default, queries are projected from the hidden states directly."""

    kv_lora_rank: int = flag(32, above=0)
    """MLA: key-value latent width."""

    qk_head_dim: int = flag(128, above=0)
    """MLA: non-rotary channels per query and key head."""

    qk_pos_emb_head_dim: int = flag(64, above=0)
    """MLA: rotary channels per query and key head. All heads share the rotary channels of the key."""

    v_head_dim: int = flag(128, above=0)
    """MLA: channels per value head."""

    mla_scale_latents: bool = False
    """MLA: multiply the normalized latents by the square root of --hidden-size / latent width (LongCat-Flash)."""

    mla_head_gate: bool = False
    """MLA: project the layer's input to one gate per head, and multiply each head's output by the sigmoid of its gate
    (Ling 3.0)."""

    mla_latent_gate: bool = flag(
        False,
        needs="--q-lora-rank",
        excludes="--mla-head-gate: the heads are already gated",
    )
    """MLA: project queries from the concatenation of the normalized and the unnormalized query latent. Also project one
    gate per head output channel from this concatenation, and multiply the head outputs by the sigmoids of the gates
    (A.X K2)."""

    latent_norm_epsilon: float | None = flag(None, above=0, no_effect_without="--qk-layernorm")
    """MLA: epsilon of the latent norms, 1e-6 in DeepSeek-V3; default: --layernorm-epsilon."""


def widths(config: TransformerConfig) -> HeadWidths:
    """Return the head widths of multi-latent attention."""
    own = config.options(LatentAttentionFlags)
    return HeadWidths(own.qk_head_dim + own.qk_pos_emb_head_dim, own.qk_pos_emb_head_dim, own.v_head_dim)


def latents(config: TransformerConfig) -> str:
    """Return the text that describes the latent widths in a plan."""
    own = config.options(LatentAttentionFlags)
    queries = f" for queries {own.q_lora_rank}," if own.q_lora_rank else ""
    return f", latents{queries} for keys and values {own.kv_lora_rank}"


MLA = "--multi-latent-attention"


def latent_attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with multi-latent attention."""
    m = c.model
    if m.attention_module not in ("self_attention", "multi_latent_attention"):
        yield Problem.exclusive(MLA, None, f"--attention-module {m.attention_module}")
    if m.group_query_attention:
        why = "all heads share one latent, but each head has its own keys and values"
        yield Problem.exclusive(MLA, None, "--group-query-attention", why)
    for name, given in (
        ("--attention-output-gate", m.attention_output_gate),
        ("--head-wise-attn-gate", m.head_wise_attn_gate),
        (f"--value-channels {m.value_channels}", m.value_channels),
        (f"--attention-value-scale {m.attention_value_scale:g}", m.attention_value_scale != 1),
        (f"--clip-qkv {m.clip_qkv}", m.clip_qkv),
        ("--qk-layernorm-after-rotary", m.qk_layernorm_after_rotary),
        (f"--window-num-query-groups {m.window_num_query_groups}", m.window_num_query_groups),
    ):
        if given:
            yield Problem.exclusive(MLA, None, name, "only other attention modules support it")
    if m.qk_layernorm and m.qk_layernorm_scope != "head":
        rule = f"is not supported by {MLA}, which normalizes latents"
        yield Problem("--qk-layernorm-scope", m.qk_layernorm_scope, rule, "remove it")
    if m.alibi:
        why = "latent attention rotates --qk-pos-emb-head-dim channels of each head"
        yield Problem.exclusive(MLA, None, "--position-embedding-type alibi", why)
    idle = {
        "--kv-channels": (m.kv_channels, "whose head width is --qk-head-dim + --qk-pos-emb-head-dim"),
        "--rotary-interleaved": (m.rotary_interleaved, "which always rotates pairs of neighbouring channels"),
        "--add-qkv-bias": (m.add_qkv_bias, "whose up-projections have no biases"),
    }
    for name, (value, why) in idle.items():
        if value:
            shown = None if value is True else value
            yield Problem(name, shown, f"has no effect with {MLA}, {why}", "remove it", harmless=True)
    if m.qk_l2_norm:
        yield Problem.exclusive("--qk-l2-norm", None, MLA, "its heads are projected from latents")
    own, variant = c.options(LatentAttentionFlags), m.experimental_attention_variant
    for name, given, others in (
        ("--mla-head-gate", own.mla_head_gate, ("dsa", "dsv4_hybrid")),
        ("--mla-latent-gate", own.mla_latent_gate, ("dsv4_hybrid",)),
    ):
        if given and variant in others:
            yield Problem.exclusive(
                name, None, f"--experimental-attention-variant {variant}", "it does not support these gates"
            )
    rotary = c.options(LatentAttentionFlags).qk_pos_emb_head_dim
    if rotary > 0 and 0 < m.rotary_percent <= 1 and (m.rotary_dim < 2 or m.rotary_dim % 2):
        rule = f"times --rotary-percent {m.rotary_percent:g} rotates {m.rotary_dim} channels; it must be an even number"
        yield Problem("--qk-pos-emb-head-dim", rotary, rule, "for example 64")
    if (chosen := linear_format(c.parallel)) is not None:
        yield from _aligned(c, LINEAR_FORMATS.facts(chosen))


def _aligned(c: RunConfig, facts: LinearFormatFacts) -> Iterator[Problem]:
    """Check that the matrix dimensions on each rank, and the number of tokens projected to latents, are multiples of
    the sizes that the linear format requires."""
    m = c.model
    own = c.options(LatentAttentionFlags)
    tp = c.parallel.tensor_model_parallel_size
    if m.moe_latent_size is None:  # with --moe-latent-size, the flag rule for experts checks the number of tokens
        yield from tokens_for_latents(c)
    heads = m.num_attention_heads // tp if tp > 0 and m.num_attention_heads % tp == 0 else 0
    if heads < 1:
        return
    whole, under = facts.alignment(c.parallel, 1)
    rule = f"must be a multiple of {whole} under {under}"
    rotary = own.qk_pos_emb_head_dim
    for name, width in (
        ("--q-lora-rank", own.q_lora_rank),
        ("--kv-lora-rank", own.kv_lora_rank),
        ("--qk-pos-emb-head-dim", rotary),
    ):
        if width is not None and width % whole:
            yield Problem(name, width, rule, multiples(width, whole))
    alignment, under = facts.alignment(c.parallel, tp)
    rule, step = f"must be a multiple of {alignment} under {under}", alignment // gcd(alignment, heads)
    widths = {"--qk-head-dim": own.qk_head_dim, "--v-head-dim": own.v_head_dim}
    widths |= {} if rotary % whole else {"--qk-pos-emb-head-dim": rotary}
    for name, width in widths.items():
        if width % step:
            of_rank = f"times the {heads} heads of a rank {rule}"
            yield Problem(name, width, of_rank, multiples(width, step))


MIXERS.register(
    "multi_latent_attention",
    f"{__package__}.multi_latent_attention:MultiLatentAttention",
    attention=AttentionFacts(
        chosen_by=lambda config: config.options(LatentAttentionFlags).multi_latent_attention,
        widths=widths,
        grouped=False,
        rotates=True,
        rope_type="yarn",
        scales_scores=True,
    ),
    rules=latent_attention,
    described=latents,
    letter="+",
    recomputed="mla_up_proj",
    recomputed_with="--multi-latent-attention",
)
