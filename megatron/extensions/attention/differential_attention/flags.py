"""Registers differential attention, and defines its flag and flag rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.mixers import MIXERS, AttentionFacts, HeadWidths
from megatron.core.config.model import TransformerConfig
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME = "differential_attention"
CHOICE = f"--attention-module {NAME}"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with differential attention."""
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    pairs = 2 * max(tp, 1)
    if m.num_attention_heads > 0 and m.query_groups > 0 and m.query_groups % pairs:
        rule = f"must be a multiple of 2 * tensor parallel size = {pairs}: {CHOICE} pairs query groups"
        name = "--num-query-groups" if m.group_query_attention else "--num-attention-heads"
        yield Problem(name, m.query_groups, rule, f"for example {pairs}")
    for name, given in (
        ("--attention-output-gate", m.attention_output_gate),
        ("--head-wise-attn-gate", m.head_wise_attn_gate),
        (f"--value-channels {m.value_channels}", m.value_channels),
        (f"--attention-value-scale {m.attention_value_scale:g}", m.attention_value_scale != 1),
        ("--qk-layernorm", m.qk_layernorm),
        ("--qk-l2-norm", m.qk_l2_norm),
        (f"--clip-qkv {m.clip_qkv}", m.clip_qkv),
        (f"--attention-temperature-coeff {m.attention_temperature_coeff:g}", m.attention_temperature_coeff),
        ("--softmax-type", m.softmax_type != "vanilla"),
    ):
        if given:
            yield Problem.exclusive(CHOICE, None, name, "only other attention modules support it")


@extension_flags("differential attention", part_of="model")
@dataclass(frozen=True)
class DifferentialAttentionFlags:
    """Differential attention (arXiv 2410.05258)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(CHOICE, lambda config: config.model.attention == NAME)

    differential_lambda_std: float = flag(0.1, at_least=0, training_only=True)
    """Differential attention: standard deviation of the initial values of the vectors that determine lambda, the factor
    of the second softmax."""


def widths(config: TransformerConfig) -> HeadWidths:
    """Return the head widths of queries, keys and values. Value heads are twice as wide, because each head of a pair
    attends to the values of both heads."""
    key = config.kv_channels or config.hidden_size // config.num_attention_heads
    return HeadWidths(key, key, 2 * key)


MIXERS.register(
    NAME, f"{__package__}.{NAME}:DifferentialAttention", attention=AttentionFacts(widths=widths), rules=rules
)
