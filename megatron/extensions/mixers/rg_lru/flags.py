"""Registers RG-LRU, and defines its flags and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.extensions.layers.hybrid_layers.flags import has_linear_attention
from megatron.extensions.layers.hybrid_layers.rules import unless_aligned, unless_shared
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

WIDTH, BLOCKS = "--rg-lru-width", "--rg-lru-num-blocks"


@extension_flags("RG-LRU", part_of="model")
@dataclass(frozen=True)
class RgLruFlags:
    """Options of RG-LRU (arXiv 2402.19427)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention("rg_lru", "R")

    rg_lru_width: int | None = flag(None, above=0)
    """RG-LRU: number of channels; default: --hidden-size."""

    rg_lru_num_blocks: int | None = flag(None, above=0)
    """RG-LRU: number of blocks into which the channels are divided. The gates of a block depend only on the channels of
    this block. Default: --num-attention-heads."""

    rg_lru_conv_kernel_dim: int = flag(4, above=0)
    """RG-LRU: kernel size of the causal convolution, in tokens."""


def shape_of(config: TransformerConfig) -> tuple[int, int]:
    """Return the number of blocks, and the number of channels per block."""
    own = config.options(RgLruFlags)
    blocks = own.rg_lru_num_blocks or config.num_attention_heads
    return blocks, (own.rg_lru_width or config.hidden_size) // blocks


def rg_lru(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with RG-LRU."""
    own = c.model.options(RgLruFlags)
    hidden = c.model.hidden_size
    heads = c.model.num_attention_heads
    width, blocks = own.rg_lru_width or hidden, own.rg_lru_num_blocks or heads
    yield from unless_shared(c, BLOCKS, own.rg_lru_num_blocks, "the blocks of RG-LRU", heads)
    if not divides(blocks, width):
        is_default = "" if own.rg_lru_width else f"is {width} by default, and "
        rule = f"{is_default}must be a multiple of {BLOCKS} {blocks}"
        yield Problem(WIDTH, own.rg_lru_width, rule, multiples(width, max(blocks, 1)))
    else:
        yield from unless_aligned(c, WIDTH, own.rg_lru_width, 1, "channels of RG-LRU", hidden)


def described(config: TransformerConfig) -> str:
    """Return the text that describes the channels of RG-LRU in a plan."""
    return ", {} blocks of {} channels".format(*shape_of(config))


MIXERS.register(
    "rg_lru",
    f"{__package__}.rg_lru:RgLru",
    rules=rg_lru,
    described=described,
    letter="R",
    whole_sequences=True,
)
