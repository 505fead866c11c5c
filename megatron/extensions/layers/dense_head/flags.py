"""The flag of the dense head, its rules, and its registration. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.layers import RESIDUALS
from megatron.core.config.model import TransformerConfig
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME, SWITCH = "dense_head", "--dense-head"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Rules of a model with a dense head."""
    m = config.model
    if m.options(DenseHeadFlags).dense_head and (others := [n for n in RESIDUALS.wanted(m) if n != NAME]):
        yield Problem.exclusive(SWITCH, None, f"the residual stream {others[0]}", "the head reads hidden states")


@extension_flags("dense head", part_of="model", rules=rules)
@dataclass(frozen=True)
class DenseHeadFlags:
    """A dense layer before the output layer."""

    NO_EFFECT_WITHOUT: ClassVar = SWITCH

    dense_head: bool = flag(
        False,
        excludes=(
            "--norm-placement sum: there is no final norm",
            "--mtp-num-layers: the dense layer belongs to the last layer alone",
        ),
    )
    """Between the final norm and the output layer, add a linear layer, GELU and a second norm (ModernBERT's
    decoder)."""


def is_chosen(config: TransformerConfig) -> bool:
    return config.options(DenseHeadFlags).dense_head


RESIDUALS.register(NAME, f"{__package__}.head:PlainResidual", when=is_chosen, width=lambda config: config.hidden_size)
