"""Registers layers in which each sublayer's output is added to the sublayer's normalized input, and defines their flag
and flag rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.layers import LAYERS
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME = "normed_residual"
CHOICE = f"--layer-module {NAME}"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    m = config.model
    if m.layer_module != NAME:
        return
    if m.norm_placement != "pre":
        yield Problem.exclusive("--norm-placement", m.norm_placement, CHOICE, "it normalizes inputs")
    if m.parallel_residual:
        yield Problem.exclusive("--parallel-residual", None, CHOICE, "each sublayer normalizes the stream")
    if m.recomputes("layernorm"):
        rule = f"has no effect with {CHOICE}: the norm output is saved as the residual stream"
        yield Problem("--recompute-modules", "layernorm", rule, "remove it", harmless=True)


@extension_flags("residual streams of norms", part_of="model", rules=rules, always=True)
@dataclass(frozen=True)
class NormedResidualFlags:
    """Layers of --layer-module normed_residual: x = norm(x), then x = weight * x + f(x), for each sublayer f."""

    NO_EFFECT_WITHOUT: ClassVar = CHOICE

    residual_weight: float = flag(1.0, above=0)
    """Normed residual layers: weight of the normalized input x in x = weight * x + f(x). --residual-multiplier scales
    the sublayer output f(x)."""


LAYERS.register(NAME, f"{__package__}.layer:NormedResidualLayer")
