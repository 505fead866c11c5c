"""Flags of lightning attention, its rules, and facts about it before it is imported. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.parts import LINEAR_ATTENTIONS, LINEAR_FORMATS, linear_format
from megatron.extensions.hybrid_layers.flags import has_linear_attention
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags


@extension_flags("lightning attention", part_of="model")
@dataclass(frozen=True)
class LightningFlags:
    """How lightning attention is computed (arXiv 2401.04658)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention("lightning_attention", "L")

    lightning_chunk_size: int = flag(256, above=0)
    """Lightning attention: tokens that are mixed at a time by products of their scores. It affects speed and memory, no
    result."""


def lightning(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Rules of a model with lightning attention. Another rule makes the heads a multiple of TP."""
    m, p = c.model, c.parallel
    tp, cp, heads, name = p.tensor_model_parallel_size, p.context_parallel_size, m.num_attention_heads, linear_format(p)
    if not divides(tp, heads):
        return
    if not divides(tp * cp, heads):
        ranks = f"--tensor-model-parallel-size {tp} * --context-parallel-size {cp} = {tp * cp}"
        rule = f"must be a multiple of {ranks}, as these ranks share the heads of lightning attention"
        near = f"{multiples(heads, max(tp * cp, 1))}, or lower --context-parallel-size"
        yield Problem("--num-attention-heads", heads, rule, near)
    elif name is not None and not m.attention_facts.grouped:  # whose heads have a rule of their own
        alignment, under = LINEAR_FORMATS.facts(name).alignment(p, tp)
        if heads // tp * m.head_dim % alignment:
            each = f"a rank's {heads // tp} heads of {m.head_dim} channels of lightning attention"
            rule = f"under {under}, {each} must have a multiple of {alignment} channels"
            step = alignment // gcd(alignment, m.head_dim) * tp
            yield Problem("--num-attention-heads", heads, rule, multiples(heads, step))


LINEAR_ATTENTIONS.register(
    "lightning_attention",
    f"{__package__}.lightning_attention:LightningAttention",
    parameters=f"{__package__}.parameters:lightning_metas",
    rules=f"{__name__}:lightning",
    described=lambda config: f", {config.num_attention_heads} heads of {config.head_dim}",
    letter="L",
    whole_sequences=True,
)
