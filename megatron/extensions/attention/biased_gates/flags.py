"""Registers self-attention with biased gates, and defines its flags and flag rules. This module does not import
torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.mixers import MIXERS, AttentionFacts
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME = "biased_gates"
CHOICE = f"--attention-module {NAME}"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with biased gates."""
    m = config.model
    if not m.attention_output_gate:
        yield Problem("--attention-module", NAME, "adds a bias to output gates", "add --attention-output-gate")
    if m.attention_temperature_coeff and config.options(BiasedGatesFlags).query_growth_exponent:
        flag = f"--attention-temperature-coeff {m.attention_temperature_coeff:g}"
        yield Problem.exclusive("--query-growth-exponent", None, flag, "both scale queries by their positions")


@extension_flags("biased gates", part_of="model")
@dataclass(frozen=True)
class BiasedGatesFlags:
    """Self-attention with one output gate bias per head (Beam)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(CHOICE, lambda config: config.model.attention == NAME)

    query_growth_exponent: float = flag(0.0, at_least=0)
    """Biased gates: exponent e of the query scaling factor. In layers without rotary embedding, the query at position
    p, counted from 0, is multiplied by (1 + (p + 1) / N)^e, where N is --query-growth-length. An exponent of 0 disables
    scaling. Beam uses 0.1."""

    query_growth_length: int = flag(2048, above=0)
    """Biased gates: length N in the query scaling factor of --query-growth-exponent."""


MIXERS.register(NAME, f"{__package__}.{NAME}:BiasedGateAttention", attention=AttentionFacts(), rules=rules)
