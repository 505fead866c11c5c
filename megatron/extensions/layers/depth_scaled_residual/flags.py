"""Registers the depth-scaled residual stream and defines its flag. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.layers import RESIDUALS
from megatron.core.config.model import TransformerConfig
from megatron.training.extensions import extension_flags

SWITCH = "--depth-scaled-residual"


@extension_flags("depth-scaled residual stream", part_of="model")
@dataclass(frozen=True)
class DepthScaledResidualFlags:
    """Residual stream whose additions are scaled according to their position."""

    NO_EFFECT_WITHOUT: ClassVar = SWITCH

    depth_scaled_residual: bool = flag(
        False,
        excludes=(
            "--parallel-residual: attention and MLP outputs must be added one after another",
            "--norm-placement sum: normalizing each sum would undo the scaling",
            "--mtp-num-layers: the scaling is defined only for the layers of the model",
        ),
    )
    """Scale each addition to the residual stream: x becomes sqrt((n - 1) / n) x + sqrt(1 / n) f(x), where n counts the
    terms of the stream. The embeddings are the first term, and n is 2 for the first attention layer. As a result, the
    variance of the stream does not grow with depth (Beam)."""


def is_chosen(config: TransformerConfig) -> bool:
    return config.options(DepthScaledResidualFlags).depth_scaled_residual


RESIDUALS.register("depth_scaled", f"{__package__}.residual:DepthScaledResidual", switch=SWITCH, when=is_chosen)
