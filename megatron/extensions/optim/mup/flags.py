"""Registers muP and CompleteP, and defines their flags. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.config.param_groups import PARAMETER_RULES
from megatron.training.extensions import extension_flags

SWITCH = "--use-mup"


@extension_flags(
    "muP and CompleteP",
    rules=f"{__package__}.settings:problems",
    resolve=f"{__package__}.settings:with_multipliers",
    part_of="model",
)
@dataclass(frozen=True)
class MupFlags:
    use_mup: bool = flag(False, training_only=True)
    """Scale initial values, learning rates, Adam's epsilon, weight decay and multipliers with the model's width and
    depth, so that hyperparameters tuned on the base model transfer to this model."""

    mup_base_hidden_size: int | None = flag(None, above=0, no_effect_without=SWITCH, training_only=True)
    """--use-mup: hidden size of the base model. By default, the base model's other widths (MLPs, heads or their
    channels, latents) have the same ratio to the hidden size as in this model. Default: --hidden-size."""

    mup_base_widths: tuple[str, ...] | None = flag(
        None, many=True, no_effect_without="--mup-base-hidden-size", training_only=True
    )
    """--use-mup: widths of the base model whose ratio to the hidden size differs from this model's. Each entry is
    NAME=NUMBER with the name of a flag, such as moe-ffn-hidden-size=512 for experts whose width does not grow."""

    mup_base_num_layers: int | None = flag(None, above=0, no_effect_without=SWITCH, training_only=True)
    """--use-mup: --num-layers of the base model. If this number is set, the output of each sublayer is multiplied by
    base number of layers / --num-layers (CompleteP), and initial values do not depend on depth. By default, nothing is
    scaled with depth."""

    mup_base_head_dim: float | None = flag(None, above=0, no_effect_without=SWITCH, training_only=True)
    """--use-mup: channels of a head in the base model. If this number is set, attention scores are multiplied by
    sqrt(base) / channels^power instead of 1 / channels^power. The base model's scores are then scaled as without
    muP."""

    mup_embedding_mult: float = flag(1.0, above=0, no_effect_without=SWITCH, training_only=True)
    """--use-mup: factor of word embeddings."""

    mup_output_mult: float = flag(1.0, above=0, no_effect_without=SWITCH, training_only=True)
    """--use-mup: factor by which the logits are multiplied, in addition to base hidden size / --hidden-size."""

    mup_attn_scale_power: float = flag(1.0, at_least=0, no_effect_without=SWITCH, training_only=True)
    """--use-mup: attention scores are divided by the number of channels per head, raised to this power. Without muP,
    the power is 0.5. No effect with --softmax-scale."""

    mup_width_mult: float = flag(1.0, above=0, no_effect_without=SWITCH, training_only=True)
    """--use-mup: ratio of the hidden size to the base model's hidden size. Computed automatically."""

    mup_parameter_widths: tuple[str, ...] | None = flag(None, many=True, no_effect_without=SWITCH, training_only=True)
    """--use-mup: parameters whose input or output size grows by a different ratio than the hidden size. Computed
    automatically."""

    mup_depth_mult: float = flag(1.0, above=0, no_effect_without=SWITCH, training_only=True)
    """--use-mup: ratio of the number of layers to the base model's number of layers. Computed automatically."""


PARAMETER_RULES.register(
    "muP", f"{__package__}.rule:MupRule", when=lambda optimizer: optimizer.options(MupFlags).use_mup
)
