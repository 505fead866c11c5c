"""The flag of the depth-scaled residual stream, its rules, and its registration. No torch."""

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

NAME, SWITCH = "depth_scaled", "--depth-scaled-residual"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    m = config.model
    if not m.options(DepthScaledResidualFlags).depth_scaled_residual:
        return
    if others := [name for name in RESIDUALS.wanted(m) if name != NAME]:
        yield Problem.exclusive(SWITCH, None, f"the residual stream {others[0]}", "both replace the plain one")
    if (module := m.layer_module) != "transformer_layer":
        why = "a layer of your own adds outputs to hidden states by itself"
        yield Problem.exclusive(SWITCH, None, f"--layer-module {module}", why)


@extension_flags("depth-scaled residual stream", part_of="model", rules=rules)
@dataclass(frozen=True)
class DepthScaledResidualFlags:
    """A residual stream whose additions are scaled by their number."""

    NO_EFFECT_WITHOUT: ClassVar = SWITCH

    depth_scaled_residual: bool = flag(
        False,
        excludes=(
            "--parallel-residual: each addition has its number",
            "--norm-placement sum: norms of sums undo the scale",
            "--mtp-num-layers: additions are counted over the layers of the model",
        ),
    )
    """Scale each addition to the residual stream by its number n, which is 2 for the first attention: x becomes
    sqrt((n - 1) / n) x + sqrt(1 / n) f(x), so that the variance of the stream does not grow with depth (Beam)."""


def is_chosen(config: TransformerConfig) -> bool:
    return config.options(DepthScaledResidualFlags).depth_scaled_residual


RESIDUALS.register(
    NAME, f"{__package__}.residual:DepthScaledResidual", when=is_chosen, width=lambda config: config.hidden_size
)
