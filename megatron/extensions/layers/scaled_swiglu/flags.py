"""Registers scaled SwiGLU, and defines its flag and flag rule. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.activations import ACTIVATIONS
from megatron.core.config.flag_spec import flag
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME = "scaled_swiglu"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(ScaledSwiGLUFlags)
    if own.swiglu_multipliers is not None and len(own.swiglu_multipliers) != 2:
        rule = "must be two numbers, for gates and for outputs"
        yield Problem("--swiglu-multipliers", own.swiglu_multipliers, rule, "use for example 1 1")


@extension_flags("scaled SwiGLU", part_of="model", rules=rules)
@dataclass(frozen=True)
class ScaledSwiGLUFlags:
    """Factors of --activation-func scaled_swiglu (Falcon-H1, arXiv 2507.22448)."""

    NO_EFFECT_WITHOUT: ClassVar = f"--activation-func {NAME}"

    swiglu_multipliers: tuple[float, ...] | None = flag(None, many=True)
    """Scaled SwiGLU: two factors. The gates are multiplied by the first factor before SiLU is applied, and the outputs
    are multiplied by the second factor. Default: 1 1."""


ACTIVATIONS.register(NAME, f"{__package__}.scaled_swiglu:ScaledSwiGLU", gated=True)
