"""The flag of self-attention with normalized values, its rules, and its registration. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import Condition
from megatron.core.config.mixers import MIXERS, AttentionFacts
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME = "normed_values"
CHOICE = f"--attention-module {NAME}"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Rules of a model with normalized values."""
    m = config.model
    if m.clip_qkv is not None:
        yield Problem.exclusive(CHOICE, None, f"--clip-qkv {m.clip_qkv:g}", "values are normalized before the clip")
    if not config.options(NormedValuesFlags).global_keys_as_values:
        return
    for name, given in (
        ("--attention-output-gate", m.attention_output_gate),
        ("--head-wise-attn-gate", m.head_wise_attn_gate),
        (f"--value-channels {m.value_channels}", m.value_channels not in (None, m.head_dim)),
    ):
        if given:
            yield Problem.exclusive("--global-keys-as-values", None, name, "keys are the only values")


@extension_flags("normalized values", part_of="model")
@dataclass(frozen=True)
class NormedValuesFlags:
    """Self-attention whose values are normalized (Gemma 4)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(CHOICE, lambda config: config.model.attention == NAME)

    global_keys_as_values: bool = False
    """Normalized values: layers without a sliding window or chunks have no projection of values. Their keys, before
    norm and rotary embedding, are the values."""


MIXERS.register(NAME, f"{__package__}.{NAME}:NormedValueAttention", attention=AttentionFacts(), rules=rules)
