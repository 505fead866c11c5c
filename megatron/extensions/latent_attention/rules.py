"""Rules of multi-latent attention. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megatron.core.facts import LinearFormatFacts
from megatron.core.parts import LINEAR_FORMATS, linear_format
from megatron.extensions.latent_attention.flags import LatentAttentionFlags
from megatron.training.config.problem import Problem, multiples
from megatron.training.config.rules.parallel import tokens_for_latents
from megatron.training.config.run_config import RunConfig

MLA = "--multi-latent-attention"


def latent_attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Rules of a model with multi-latent attention."""
    m = c.model
    if m.attention_module not in ("self_attention", "multi_latent_attention"):
        yield Problem.exclusive(MLA, None, f"--attention-module {m.attention_module}")
    if m.group_query_attention:
        why = "all heads share one latent, and each has keys and values of its own"
        yield Problem.exclusive(MLA, None, "--group-query-attention", why)
    for flag, given in (
        ("--attention-output-gate", m.attention_output_gate),
        ("--head-wise-attn-gate", m.head_wise_attn_gate),
        (f"--value-channels {m.value_channels}", m.value_channels),
        (f"--attention-value-scale {m.attention_value_scale:g}", m.attention_value_scale != 1),
        (f"--clip-qkv {m.clip_qkv}", m.clip_qkv),
        ("--qk-layernorm-after-rotary", m.qk_layernorm_after_rotary),
        (f"--window-num-query-groups {m.window_num_query_groups}", m.window_num_query_groups),
    ):
        if given:
            yield Problem.exclusive(MLA, None, flag, "it is a part of other attention only")
    if m.qk_layernorm and m.qk_layernorm_scope != "head":
        rule = f"is not known to {MLA}, whose norms are those of latents"
        yield Problem("--qk-layernorm-scope", m.qk_layernorm_scope, rule, "remove it")
    if m.alibi:
        why = "latent attention rotates --qk-pos-emb-head-dim channels of each head"
        yield Problem.exclusive(MLA, None, "--position-embedding-type alibi", why)
    idle = {
        "--kv-channels": (m.kv_channels, "whose heads are --qk-head-dim + --qk-pos-emb-head-dim wide"),
        "--rotary-interleaved": (m.rotary_interleaved, "which always rotates pairs of neighbouring channels"),
        "--add-qkv-bias": (m.add_qkv_bias, "whose projections to heads have no biases"),
    }
    for flag, (value, why) in idle.items():
        if value:
            shown = None if value is True else value
            yield Problem(flag, shown, f"has no effect with {MLA}, {why}", "remove it", harmless=True)
    if m.qk_l2_norm:
        yield Problem.exclusive("--qk-l2-norm", None, MLA, "its heads are made of latents")
    rotary = c.options(LatentAttentionFlags).qk_pos_emb_head_dim
    if rotary > 0 and 0 < m.rotary_percent <= 1 and (m.rotary_dim < 2 or m.rotary_dim % 2):
        rule = f"times --rotary-percent {m.rotary_percent:g} rotates {m.rotary_dim} channels; it must be an even number"
        yield Problem("--qk-pos-emb-head-dim", rotary, rule, "for example 64")
    if (name := linear_format(c.parallel)) is not None:
        yield from _aligned(c, LINEAR_FORMATS.facts(name))


def _aligned(c: RunConfig, facts: LinearFormatFacts) -> Iterator[Problem]:
    """Each rank's matrices in another format must have aligned dimensions, and so must its tokens that are projected to
    latents."""
    m = c.model
    own = c.options(LatentAttentionFlags)
    tp = c.parallel.tensor_model_parallel_size
    if m.moe_latent_size is None:  # else that of experts says so
        yield from tokens_for_latents(c)
    heads = m.num_attention_heads // tp if tp > 0 and m.num_attention_heads % tp == 0 else 0
    if heads < 1:
        return
    whole, under = facts.alignment(c.parallel, 1)
    rule = f"must be a multiple of {whole} under {under}"
    rotary = own.qk_pos_emb_head_dim
    for flag, width in (
        ("--q-lora-rank", own.q_lora_rank),
        ("--kv-lora-rank", own.kv_lora_rank),
        ("--qk-pos-emb-head-dim", rotary),
    ):
        if width is not None and width % whole:
            yield Problem(flag, width, rule, multiples(width, whole))
    alignment, under = facts.alignment(c.parallel, tp)
    rule, step = f"must be a multiple of {alignment} under {under}", alignment // gcd(alignment, heads)
    widths = {"--qk-head-dim": own.qk_head_dim, "--v-head-dim": own.v_head_dim}
    widths |= {} if rotary % whole else {"--qk-pos-emb-head-dim": rotary}
    for flag, width in widths.items():
        if width % step:
            of_rank = f"times the {heads} heads of a rank {rule}"
            yield Problem(flag, width, of_rank, multiples(width, step))
