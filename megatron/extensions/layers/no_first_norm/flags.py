"""Registers --layer-module no_first_norm, which omits the norm before the first layer's attention, and defines its flag
rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.layers import LAYERS
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME = "no_first_norm"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    m = config.model
    if m.layer_module == NAME and not m.norms_inputs:
        rule = "removes an input norm, but the model has no input norms"
        yield Problem("--layer-module", NAME, rule, "remove it, or use --norm-placement pre")


@extension_flags("no first norm", part_of="model", rules=rules, always=True)
@dataclass(frozen=True)
class NoFirstNormFlags:
    """Layers of --layer-module no_first_norm. This extension has no flags of its own."""


LAYERS.register(NAME, f"{__package__}.layer:NoFirstNormLayer")
