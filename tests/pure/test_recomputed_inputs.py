"""Tests of `with_input_recomputed`, which saves the inputs of a cheap function instead of its results. The results may
be tensors in any nested structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.recompute import with_input_recomputed


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def halves(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    a, b = x.chunk(2) if isinstance(x, Tensor) else x
    return a.sin(), b.cos()


def named_halves(pair: Pair) -> tuple[Tensor, Tensor]:
    return pair.left.sin(), pair.right.cos()


@pytest.mark.parametrize(
    ("join", "produce"),
    [(torch.cat, halves), (tuple, halves), (lambda parts: Pair(*parts), named_halves)],
    ids=["tensor", "tuple", "named tuple"],
)
def test_gradients_equal_those_of_saved_results(join: Callable[..., object], produce: Callable[..., object]) -> None:
    torch.manual_seed(3)
    parts = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    product = lambda a, b: (a * b.exp()).sum()  # noqa: E731
    plain = torch.autograd.grad(product(parts[0].sin(), parts[1].cos()), parts)
    again = torch.autograd.grad(with_input_recomputed(produce, join(parts), product), parts)
    assert all(a.equal(b) for a, b in zip(plain, again, strict=True))
