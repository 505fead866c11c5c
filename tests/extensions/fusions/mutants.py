"""Mutants of fused norms and of heads that are split at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.extensions.fusions import fused_norm, split_heads
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants


def _backward_of_the_norm_alone(x: Tensor, of_total: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return _true_backward(x, None, *args)


def _weight_gradient_of_plain_rows(x: Tensor, of_total: Tensor | None, dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    dx, _, *of_bias = _true_backward(x, of_total, dy, *args)
    return dx, (dy * x).sum((0, 1)), *of_bias


def _normalized_without_the_sum(x: Tensor, update: Tensor, mask: Any, *args: Any) -> tuple[Tensor, ...]:
    return x, *fused_norm._normalized(x + update, *args)


def _update_as_if_all_were_kept(mask: Any, *args: Any) -> tuple[Tensor | None, ...]:
    dx, *of_parameters = _true_backward(*args)
    return dx, None, *of_parameters


_true_backward = fused_norm._backward


def _rotated_forward_again(grads: Sequence[Tensor], tables: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return _true_parts(grads, [tables[0], -tables[1]], *rest)


def _without_values(grads: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return _true_parts((*grads[:-1], torch.zeros_like(grads[-1])), *rest)


def _bias_gradient_of_some_tokens(grads: Sequence[Tensor], *args: Any) -> tuple[Tensor, Tensor]:
    joined, _ = _true_joined(grads, *args)
    return joined, joined[1:].sum((0, 1))


_true_joined, _true_parts = split_heads._joined_and_summed, split_heads._parts

MUTANTS: Mutants = {
    "gradients of queries and keys rotated forward once more": (
        [(split_heads, "_parts", _rotated_forward_again)],
        Combination.of(world="2", style="gptj"),
    ),
    "gradient of the bias of queries, keys and values from a part of the tokens": (
        [(split_heads, "_joined_and_summed", _bias_gradient_of_some_tokens)],
        Combination.of(world="2", tp="2sp", regions="fused", style="gptj"),
    ),
    "gradient of values lost where queries and keys are rotated": (
        [(split_heads, "_parts", _without_values)],
        Combination.of(world="2", style="gptj"),
    ),
    "gradient of the residual stream lost in the fused norm": (
        [(fused_norm, "_backward", _backward_of_the_norm_alone)],
        Combination.of(world="2", tp="2sp", regions="fused", style="llama"),
    ),
    "gradient of the fused norm's weight from rows that are not normalized": (
        [(fused_norm, "_backward", _weight_gradient_of_plain_rows)],
        Combination.of(world="1", regions="fused", style="llama"),
    ),
    "gradient of what dropout drops before the fused norm": (
        [(fused_norm, "_backward_of_both", _update_as_if_all_were_kept)],
        Combination.of(world="2", tp="2sp", regions="fused"),
    ),
    "update left out of the stream by the fused norm": (
        [(fused_norm, "_added_and_normalized", _normalized_without_the_sum)],
        Combination.of(world="2", regions="fused", style="llama"),
    ),
}
