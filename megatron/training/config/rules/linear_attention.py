"""Rules of linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import gcd, lcm

from megatron.core.config.linear_attention import LinearAttentionConfig
from megatron.training.config.flags import field_table, flags_of, value_of
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.rules.model import pattern_of
from megatron.training.config.rules.precision import fp8_alignment
from megatron.training.config.run_config import RunConfig

VARIANT, DELTA_NET = "--experimental-attention-variant", "gated_delta_net"


def linear_attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m, p, given = c.model, c.parallel, f"{VARIANT} {c.model.experimental_attention_variant}"
    if m.experimental_attention_variant is None:
        yield from _without_variant(c)
        return
    yield from _pattern(c)
    if m.experimental_attention_variant != DELTA_NET:
        if p.context_parallel_size > 1:
            why = "its layers see the tokens of their own rank only"
            yield Problem.exclusive("--context-parallel-size", p.context_parallel_size, given, why)
        return
    keys, values = m.linear_num_key_heads, m.linear_num_value_heads
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    if keys > 0 and not divides(keys, values):
        rule = f"must be a multiple of --linear-num-key-heads {keys}"
        yield Problem("--linear-num-value-heads", values, rule, multiples(values, keys))
    if not divides(tp * cp, keys):
        rule, near = f"must be a multiple of --tensor-model-parallel-size {tp}", multiples(keys, tp * cp)
        if cp > 1:
            rule = f"{rule} * --context-parallel-size {cp} = {tp * cp}, as these ranks share its heads"
            near = f"{near}, or lower --context-parallel-size"
        yield Problem("--linear-num-key-heads", keys, rule, near)
    if p.cuda_graph_impl != "none":
        why = "its triangular solves have not been recorded"
        yield Problem.exclusive("--cuda-graph-impl", p.cuda_graph_impl, given, why)


def _without_variant(c: RunConfig) -> Iterator[Problem]:
    """Without linear attention, its layers and shape have no effect."""
    for field in fields(LinearAttentionConfig):
        value = getattr(c.model, field.name)
        if value != field.default:
            yield Problem.no_effect(field_table()[field.name].name, value, VARIANT)


def _pattern(c: RunConfig) -> Iterator[Problem]:
    m, flag = c.model, "--linear-attention-freq"
    if m.num_layers < 1:
        return
    try:
        linear = m.linear_pattern
    except ValueError as error:
        yield Problem(flag, m.linear_attention_freq, str(error), f"use for example 4 or {pattern_of(m.num_layers)}")
        return
    if not any(linear):
        rule = "leaves no layer with linear attention"
        yield Problem(flag, m.linear_attention_freq, rule, "use another pattern", harmless=True)
    if all(linear):
        for other in flags_of("model"):
            if other.field in OF_OTHER_ATTENTION and (value := value_of(c, other)) != other.default:
                shown, rule = None if value is True else value, "has no effect where every layer has linear attention"
                yield Problem(other.name, shown, rule, f"remove it, or use {flag}", harmless=True)


OF_OTHER_ATTENTION = (
    *("attention_module", "multi_latent_attention", "group_query_attention", "qk_layernorm", "softmax_scale"),
    *("attention_output_gate", "add_qkv_bias", "window_size", "attention_chunk_size", "no_rope_freq"),
)
"""Fields that linear attention does not read."""


def linear_attention_in_fp8(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Each rank's fp8 matrices of a gated delta net must have aligned dimensions."""
    m, p = c.model, c.parallel
    keys, tp = m.linear_num_key_heads, p.tensor_model_parallel_size
    if p.fp8_format is None or m.experimental_attention_variant != DELTA_NET or tp < 1 or keys < 1 or keys % tp:
        return
    alignment, under = fp8_alignment(c, tp)
    values, width, step = m.linear_num_value_heads // tp, m.linear_value_head_dim, alignment * tp
    rule = f"under {under}, a rank's {{}} must be a multiple of {alignment}"
    if values * width % alignment:
        near = multiples(width, alignment // gcd(alignment, values))
        yield Problem("--linear-value-head-dim", width, rule.format(f"{values} value heads"), near)
    rows = keys // tp * sum(m.linear_channels)
    if rows % alignment:
        near = multiples(keys, lcm(step // gcd(step, sum(m.linear_channels)), tp))
        yield Problem("--linear-num-key-heads", keys, rule.format(f"{rows} rows of the projection"), near)
