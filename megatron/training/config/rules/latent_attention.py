"""Rules of multi-latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import gcd

from megatron.core.config.latent_attention import LatentAttentionConfig
from megatron.training.config.flags import field_table
from megatron.training.config.problem import Problem, multiples
from megatron.training.config.rules.precision import FP8_ALIGNMENT, fp8_alignment
from megatron.training.config.run_config import RunConfig

MLA = "--multi-latent-attention"


def latent_attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m = c.model
    if not m.latent:
        yield from _without_latents(c)
        return
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
    rotary = m.qk_pos_emb_head_dim
    if rotary > 0 and 0 < m.rotary_percent <= 1 and (m.rotary_dim < 2 or m.rotary_dim % 2):
        rule = f"times --rotary-percent {m.rotary_percent:g} rotates {m.rotary_dim} channels; it must be an even number"
        yield Problem("--qk-pos-emb-head-dim", rotary, rule, "for example 64")


def _without_latents(c: RunConfig) -> Iterator[Problem]:
    """Without multi-latent attention, its widths have no effect."""
    for field in fields(LatentAttentionConfig):
        value = getattr(c.model, field.name)
        if value != field.default:
            yield Problem.no_effect(field_table()[field.name].name, value, MLA)


def latents_in_fp8(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Each rank's fp8 matrices of multi-latent attention must have aligned dimensions, and so must its tokens that are
    projected to latents, of attention or of experts."""
    m, p = c.model, c.parallel
    tp = p.tensor_model_parallel_size
    alignment, under = fp8_alignment(c, tp)
    rule = f"must be a multiple of {alignment} under {under}"
    projects = m.latent or m.moe_latent_size is not None
    if p.fp8_format and projects and p.sequence_parallel and tp > 1 and p.context_parallel_size > 0:
        tokens = m.seq_length // p.context_parallel_size // tp * c.training.micro_batch_size
        if tokens % alignment:
            each = f"gives a rank {tokens} tokens of a micro-batch to project to latents, which {rule}"
            near = multiples(m.seq_length, alignment * p.context_parallel_size * tp)
            yield Problem("--seq-length", m.seq_length, each, f"{near}, or another --micro-batch-size")
    heads = m.num_attention_heads // tp if tp > 0 and m.num_attention_heads % tp == 0 else 0
    if p.fp8_format is None or not m.latent or heads < 1:
        return
    rule = f"must be a multiple of {FP8_ALIGNMENT} under --fp8-format"
    if m.q_lora_rank is not None and m.q_lora_rank % FP8_ALIGNMENT:
        yield Problem("--q-lora-rank", m.q_lora_rank, rule, multiples(m.q_lora_rank, FP8_ALIGNMENT))
    if m.kv_lora_rank % FP8_ALIGNMENT:
        yield Problem("--kv-lora-rank", m.kv_lora_rank, rule, multiples(m.kv_lora_rank, FP8_ALIGNMENT))
    rotary = m.qk_pos_emb_head_dim
    if rotary % FP8_ALIGNMENT:
        yield Problem("--qk-pos-emb-head-dim", rotary, rule, multiples(rotary, FP8_ALIGNMENT))
        rotary = 0
    rule, step = f"must be a multiple of {alignment} under {under}", alignment // gcd(alignment, heads)
    widths = {"--qk-head-dim": m.qk_head_dim, "--v-head-dim": m.v_head_dim, "--qk-pos-emb-head-dim": rotary}
    for flag, width in widths.items():
        if width % step:
            of_rank = f"times the {heads} heads of a rank {rule}"
            yield Problem(flag, width, of_rank, multiples(width, step))
