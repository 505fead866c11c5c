"""Registers layers with gated norms, and defines their flag and flag rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.layers import LAYERS
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.training.config.problem import Problem, multiples
from megatron.training.config.rules.parallel import tokens_for_latents
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME = "gated_norms"
CHOICE = f"--layer-module {NAME}"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    m = config.model
    if m.layer_module != NAME:
        return
    if not m.norms_inputs:
        rule = "gates input norms, but the model has none"
        yield Problem("--layer-module", NAME, rule, "remove it, or use --norm-placement pre")
    if (chosen := linear_format(config.parallel)) is not None:
        if m.moe_latent_size is None and m.attention != "multi_latent_attention":  # other rules check the latent widths
            yield from tokens_for_latents(config)
        rank = config.options(GatedNormFlags).gated_norm_rank
        whole, under = LINEAR_FORMATS.facts(chosen).alignment(config.parallel, 1)
        if rank % whole:
            rule = f"must be a multiple of {whole} under {under}"
            yield Problem("--gated-norm-rank", rank, rule, multiples(rank, whole))


@extension_flags("gated norms", part_of="model", rules=rules, always=True)
@dataclass(frozen=True)
class GatedNormFlags:
    """Options of --layer-module gated_norms. The norms before attention and before experts return
    y * sigmoid(W2 silu(W1 y)), where y is the output of a plain norm."""

    NO_EFFECT_WITHOUT: ClassVar = CHOICE

    gated_norm_rank: int = flag(16, above=0)
    """Gated norms: rank of the gate, which is a product of two matrices with this inner width (A.X K2)."""


LAYERS.register(NAME, f"{__package__}.layer:GatedNormLayer")
