"""Registers Mamba-2, and defines its flags and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.extensions.layers.hybrid_layers.flags import has_linear_attention
from megatron.training.config.problem import Problem, divides, multiples, unless_multiple
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

HEADS = "--mamba-num-heads"
GROUPS = "--mamba-num-groups"
WIDTH = "--mamba-head-dim"
TP, CP = "--tensor-model-parallel-size", "--context-parallel-size"
EXPAND = 2
"""Default ratio of the inner width (the channels of all heads) to the hidden size. The ratio is used if
--mamba-num-heads is not set."""


NAME = "mamba2"


@extension_flags("Mamba-2", part_of="model")
@dataclass(frozen=True)
class MambaFlags:
    """Options of Mamba-2 (arXiv 2405.21060)."""

    NO_EFFECT_WITHOUT: ClassVar = has_linear_attention(NAME, "M")

    mamba_state_dim: int = flag(128, above=0)
    """Mamba-2: state size n, the number of channels of B and C. Each head has a state of n elements per channel."""

    mamba_head_dim: int = flag(64, above=0)
    """Mamba-2: channels per head."""

    mamba_num_groups: int = flag(8, above=0)
    """Mamba-2: number of head groups. The heads of a group share B and C, and are normalized together."""

    mamba_num_heads: int | None = flag(None, above=0)
    """Mamba-2: number of heads; default: 2 x hidden-size / mamba-head-dim."""

    mamba_conv_kernel_dim: int = flag(4, above=0)
    """Mamba-2: kernel size of the causal convolution, in tokens."""

    mamba_min_step_size: float = flag(0.0, at_least=0)
    """Mamba-2: lower bound of step sizes. The implementation of Nemotron-H in transformers uses 0.001, and Megatron-LM
    has no lower bound."""

    mamba_norm: bool = flag(True, name="--no-mamba-norm")
    """Mamba-2: do not normalize the outputs; only multiply them by the SiLU of the gates (Falcon-H1)."""

    mamba_norm_before_gate: bool = False
    """Mamba-2: normalize the outputs before they are multiplied by the SiLU of the gates, instead of after
    (Falcon-H1)."""

    mamba_multipliers: tuple[float, ...] | None = flag(None, many=True)
    """Mamba-2: five scale factors, for the projected gates, inputs, B, C and step sizes (Falcon-H1). Default: no
    scaling."""

    mamba_chunk_size: int = flag(128, above=0, without_effect=True)
    """Mamba-2: chunk size in tokens. The chunk size affects speed and memory, not results."""


def num_heads(config: TransformerConfig) -> int:
    own = config.options(MambaFlags)
    return own.mamba_num_heads or EXPAND * config.hidden_size // own.mamba_head_dim


def group_channels(config: TransformerConfig) -> tuple[int, int, int, int, int]:
    """Return the numbers of channels that are projected for each group, as a tuple of five: the gates, the inputs x, B,
    C, and the step sizes dt (one per head)."""
    own = config.options(MambaFlags)
    heads = num_heads(config) // own.mamba_num_groups
    return heads * own.mamba_head_dim, heads * own.mamba_head_dim, own.mamba_state_dim, own.mamba_state_dim, heads


def described(config: TransformerConfig) -> str:
    """Return the text that describes the heads of Mamba-2 in a plan."""
    own = config.options(MambaFlags)
    heads = f"{num_heads(config)} heads of {own.mamba_head_dim} in {own.mamba_num_groups} groups"
    return f", {heads}, states of {own.mamba_state_dim}"


def mamba2(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with Mamba-2."""
    own = c.options(MambaFlags)
    m = c.model
    p = c.parallel
    tp = p.tensor_model_parallel_size
    cp = p.context_parallel_size
    groups = own.mamba_num_groups
    heads = num_heads(m)
    if own.mamba_multipliers is not None and len(own.mamba_multipliers) != len(group_channels(m)):
        rule = f"must be {len(group_channels(m))} numbers, for gates, inputs, B, C and step sizes"
        yield Problem("--mamba-multipliers", own.mamba_multipliers, rule, "for example 1 1 1 1 1")
    if own.mamba_norm_before_gate and not own.mamba_norm:
        rule = "has no effect with --no-mamba-norm"
        yield Problem("--mamba-norm-before-gate", None, rule, "remove one of the two flags", harmless=True)
    if min(own.mamba_head_dim, groups, m.hidden_size, tp, cp) < 1:
        return
    if own.mamba_num_heads is None and not divides(own.mamba_head_dim, EXPAND * m.hidden_size):
        rule = f"must divide {EXPAND} * --hidden-size {m.hidden_size}"
        near = gcd(own.mamba_head_dim, EXPAND * m.hidden_size)
        yield Problem(WIDTH, own.mamba_head_dim, rule, f"nearest: {near}, or add {HEADS}")
    elif heads < 1 or not divides(groups, heads):
        shown = heads if own.mamba_num_heads is None else None
        rule = f"must be a multiple of {GROUPS} {groups}"
        rule = rule if shown is None else f"is {shown} by default, and {rule}"
        yield Problem(HEADS, own.mamba_num_heads, rule, multiples(heads, groups))
    elif not divides(tp, groups):
        yield from unless_multiple(GROUPS, groups, TP, tp)
    else:
        yield from _context_parallel(groups // tp, heads // tp, tp, cp)
        yield from _aligned(c, groups // tp)


def _context_parallel(groups: int, heads: int, tp: int, cp: int) -> Iterator[Problem]:
    """Check that the groups and heads of a tensor-parallel rank can be divided evenly between context-parallel ranks.
    Each context-parallel rank has either whole groups or a part of one group."""
    each = f" / {TP} {tp}" if tp > 1 else ""
    if not divides(cp, groups) and not divides(groups, cp):
        rule = f"gives {groups} groups{each}, which must divide {CP} {cp} or be a multiple of it"
        yield Problem(GROUPS, groups * tp, rule, f"{multiples(groups * tp, cp * tp)}, or another {CP}")
    elif not divides(cp, heads):
        rule = f"gives {heads} heads{each}, which must be a multiple of {CP} {cp}, because these ranks share the heads"
        yield Problem(HEADS, heads * tp, rule, f"{multiples(heads * tp, cp * tp)}, or another {CP}")


def _aligned(c: RunConfig, groups: int) -> Iterator[Problem]:
    """Check that the matrix dimensions on each rank are multiples of the size that the linear format requires."""
    name, tp = linear_format(c.parallel), c.parallel.tensor_model_parallel_size
    if name is None:
        return
    alignment, under = LINEAR_FORMATS.facts(name).alignment(c.parallel, tp)
    gates, *_ = channels = group_channels(c.model)
    for features, what in ((groups * sum(channels), "rows of the projection"), (groups * gates, "channels of heads")):
        if features % alignment:
            rule = f"under {under}, a rank's {features} {what} must be a multiple of {alignment}"
            heads = num_heads(c.model)
            step = alignment * c.options(MambaFlags).mamba_num_groups
            yield Problem(HEADS, heads, rule, f"{multiples(heads, step)}, which always fits")
            return


MIXERS.register(
    NAME,
    f"{__package__}.mamba2:Mamba2",
    rules=mamba2,
    described=described,
    letter="M",
    whole_sequences=True,
)
