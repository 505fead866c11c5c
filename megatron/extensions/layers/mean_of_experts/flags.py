"""Registers layers that average expert outputs, and defines their flag rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.layers import LAYERS
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME = "mean_of_experts"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    m = config.model
    if m.layer_module == NAME and (m.num_experts is None or not m.moe_shared_expert_intermediate_size):
        rule = "averages the outputs of routed experts and of a shared expert, so that both are needed"
        yield Problem("--layer-module", NAME, rule, "add --num-experts and --moe-shared-expert-intermediate-size")
    if m.layer_module == NAME and m.norms_sums:
        yield Problem.exclusive("--norm-placement", m.norm_placement, f"--layer-module {NAME}")


@extension_flags("mean of experts", part_of="model", rules=rules, always=True)
@dataclass(frozen=True)
class MeanOfExpertsFlags:
    """Layers of --layer-module mean_of_experts. This extension has no flags of its own."""


LAYERS.register(NAME, f"{__package__}.layer:MeanOfExpertsLayer")
