"""Registers an attention module and an activation function with normalized outputs, and defines their flag rules. This
module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.activations import ACTIVATIONS
from megatron.core.config.mixers import MIXERS, AttentionFacts
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

ATTENTION = "normed_output_attention"
ACTIVATION = "normed_squared_reglu"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    m = config.model
    if m.activation == ACTIVATION and m.num_experts is not None:
        why = "it normalizes over the whole width of an MLP"
        yield Problem.exclusive("--activation-func", ACTIVATION, "--num-experts", why)
    if m.activation == ACTIVATION and m.ffn_hidden_size_pattern is not None:
        yield Problem.exclusive("--activation-func", ACTIVATION, "--ffn-hidden-size-pattern")


@extension_flags("norms before output projections", part_of="model", rules=rules, always=True)
@dataclass(frozen=True)
class InnerNormFlags:
    """RMSNorms before the output projections of attention and MLP. This extension has no flags of its own."""


MIXERS.register(ATTENTION, f"{__package__}.inner_norms:NormedOutputAttention", attention=AttentionFacts())
ACTIVATIONS.register(ACTIVATION, f"{__package__}.inner_norms:NormedSquaredReGLU", gated=True)
