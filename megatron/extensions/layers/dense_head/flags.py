"""Registers the dense head and defines its flag. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.layers import RESIDUALS
from megatron.core.config.model import TransformerConfig
from megatron.training.extensions import extension_flags

SWITCH = "--dense-head"


@extension_flags("dense head", part_of="model")
@dataclass(frozen=True)
class DenseHeadFlags:
    """Options for a dense layer before the output layer."""

    NO_EFFECT_WITHOUT: ClassVar = SWITCH

    dense_head: bool = flag(
        False,
        excludes=(
            "--norm-placement sum: there is no final norm",
            "--mtp-num-layers: multi-token prediction modules have no dense layer",
        ),
    )
    """Add a linear layer, a GELU and a second norm between the final norm and the output layer, as in ModernBERT's
    decoder."""


def is_chosen(config: TransformerConfig) -> bool:
    return config.options(DenseHeadFlags).dense_head


RESIDUALS.register("dense_head", f"{__package__}.head:PlainResidual", switch=SWITCH, when=is_chosen, layers=None)
