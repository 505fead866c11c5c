"""Mutants of norms, rotations and activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer import (
    activations,
    norm,
    split_heads,
)
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants


def _rotated_forward_again(grads: Sequence[Tensor], tables: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return _true_parts(grads, [tables[0], -tables[1]], *rest)


def _without_values(grads: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return _true_parts((*grads[:-1], torch.zeros_like(grads[-1])), *rest)


def _bias_gradient_of_some_tokens(grads: Sequence[Tensor], *args: Any) -> tuple[Tensor, Tensor]:
    joined, _ = _true_joined(grads, *args)
    return joined, joined[1:].sum((0, 1))


_true_joined = split_heads._joined_and_summed


def _bias_gradient_of_some_rows(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    dx, _ = _true_biased_backward(x, *args)
    return dx, dx[1:].sum((0, 1))


_true_biased_backward = activations._biased_backward

_true_parts = split_heads._parts

MUTANTS: Mutants = {
    "sum of squares of a rank's own heads": (
        [(norm, "reduce_from", lambda x, axis: x)],
        [
            Combination.of(world="2", tp="2", block="wide norms"),
            Combination.of(world="2", tp="2sp", block="wide norms"),
        ],
    ),
    "gradient of the sum of squares from a rank's own heads": (
        [(norm, "copy_to", lambda x, axis: x)],
        [Combination.of(world="2", tp="2", block="wide norms")],
    ),
    "gradient of a bias before an activation from a part of the rows": (
        [(activations, "_biased_backward", _bias_gradient_of_some_rows)],
        [Combination.of(world="2", tp="2", regions="fused"), Combination.of(world="2", regions="fused", style="bloom")],
    ),
    "gradients of queries and keys rotated forward once more": (
        [(split_heads, "_parts", _rotated_forward_again)],
        [Combination.of(world="2", style="gptj"), Combination.of(world="2", style="gemma", heads="gqa")],
    ),
    "gradient of the bias of queries, keys and values from a part of the tokens": (
        [(split_heads, "_joined_and_summed", _bias_gradient_of_some_tokens)],
        [Combination.of(world="2", tp="2sp", regions="fused", style=style) for style in ("gptj", "bloom", "gpt")],
    ),
    "gradient of values lost where queries and keys are rotated": (
        [(split_heads, "_parts", _without_values)],
        [Combination.of(world="2", style="gptj"), Combination.of(world="2", style="gemma", heads="gqa")],
    ),
}
