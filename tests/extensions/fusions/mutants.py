"""Mutants of fused norms and of heads that are split at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.extensions.fusions import fused_norm, split_heads
from tests.parity.mutants.common import mutant


@mutant(fused_norm, "_backward", world="2", tp="2sp", regions="fused", style="llama")
def _backward_of_the_norm_alone(x: Tensor, of_total: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """Gradient of the residual stream lost in the fused norm."""
    return _true_backward(x, None, *args)


@mutant(fused_norm, "_backward", world="1", regions="fused", style="llama")
def _weight_gradient_of_plain_rows(x: Tensor, of_total: Tensor | None, dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Gradient of the fused norm's weight from rows that are not normalized."""
    dx, _, *of_bias = _true_backward(x, of_total, dy, *args)
    return dx, (dy * x).sum((0, 1)), *of_bias


@mutant(fused_norm, "_added_and_normalized", world="2", regions="fused", style="llama")
def _normalized_without_the_sum(x: Tensor, update: Tensor, mask: Any, *args: Any) -> tuple[Tensor, ...]:
    """Update left out of the stream by the fused norm."""
    return x, *fused_norm._normalized(x + update, *args)


@mutant(fused_norm, "_backward_of_both", world="2", tp="2sp", regions="fused")
def _update_as_if_all_were_kept(mask: Any, *args: Any) -> tuple[Tensor | None, ...]:
    """Gradient of what dropout drops before the fused norm."""
    dx, *of_parameters = _true_backward(*args)
    return dx, None, *of_parameters


_true_backward = fused_norm._backward


@mutant(split_heads, "_parts", world="2", style="gptj")
def _rotated_forward_again(grads: Sequence[Tensor], tables: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    """Gradients of queries and keys rotated forward once more."""
    return _true_parts(grads, [tables[0], -tables[1]], *rest)


@mutant(split_heads, "_parts", world="2", style="gptj")
def _without_values(grads: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    """Gradient of values lost where queries and keys are rotated."""
    return _true_parts((*grads[:-1], torch.zeros_like(grads[-1])), *rest)


@mutant(split_heads, "_summed", world="2", tp="2sp", regions="fused", style="gptj")
def _bias_gradient_of_some_tokens(joined: Tensor) -> Tensor:
    """Gradient of the bias of queries, keys and values from a part of the tokens."""
    return _true_summed(joined[1:])


_true_summed, _true_parts = split_heads._summed, split_heads._parts
