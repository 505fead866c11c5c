"""Registers lightning attention, and defines its flag and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.mixers import MIXERS
from megatron.extensions.layers.hybrid_layers.flags import has_linear_attention
from megatron.extensions.layers.hybrid_layers.rules import unless_aligned, unless_shared
from megatron.training.config.problem import Problem, divides
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags


@extension_flags("lightning attention", part_of="model")
@dataclass(frozen=True)
class LightningFlags:
    """Options of lightning attention (arXiv 2401.04658)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention("lightning_attention", "L")

    lightning_chunk_size: int = flag(256, above=0, without_effect=True)
    """Lightning attention: chunk size in tokens. The chunk size affects speed and memory, not results."""


def lightning(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with lightning attention. Another rule checks that the number of heads is a multiple of
    the tensor-parallel size."""
    heads = "--num-attention-heads", c.model.num_attention_heads
    if divides(c.parallel.tensor_model_parallel_size, heads[1]):
        yield from unless_shared(c, *heads, "the heads of lightning attention")
        if not c.model.attention_facts.grouped:  # for grouped attention, another rule checks the number of heads
            yield from unless_aligned(c, *heads, c.model.head_dim, "channels of heads of lightning attention")


MIXERS.register(
    "lightning_attention",
    f"{__package__}.lightning_attention:LightningAttention",
    rules=lightning,
    described=lambda config: f", {config.num_attention_heads} heads of {config.head_dim}",
    letter="L",
    whole_sequences=True,
)
