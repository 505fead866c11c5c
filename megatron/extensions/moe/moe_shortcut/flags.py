"""Registers shortcut-connected experts, and defines their flag and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.layers import RESIDUALS
from megatron.training.extensions import extension_flags


@extension_flags("shortcut-connected experts", part_of="model")
@dataclass(frozen=True)
class ShortcutFlags:
    """Shortcut-connected mixture of experts (ScMoE, arXiv 2404.05019)."""

    moe_shortcut: bool = flag(
        False,
        needs="--moe-shared-expert-intermediate-size; add --moe-shared-expert-intermediate-size, the width of the MLP "
        "beside the experts",
        excludes=(
            Condition(
                "--norm-placement: expert outputs would be normalized before they are added",
                lambda config: config.model.norms_outputs or config.model.norms_sums,
            ),
            "--moe-output-norm: the outputs of the routed and shared experts are not summed",
            "--parallel-residual: sublayers read the stream one after another",
        ),
    )
    """Add the output of a layer's routed experts to the residual stream after the MLP of the next layer, instead of in
    the same layer. The output of the last layer's experts is added after the last layer. The output of the shared
    expert is still added in the same layer (LongCat-Flash, with --moe-layer-freq 2)."""


RESIDUALS.register(
    "moe_shortcut",
    f"{__package__}.delayed:DelayedExperts",
    switch="--moe-shortcut",
    when=lambda config: config.options(ShortcutFlags).moe_shortcut,
    width=lambda config: 2 * config.hidden_size,
    experts_apart=True,
)
