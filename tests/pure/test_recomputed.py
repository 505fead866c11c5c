"""`recomputed` keeps the arguments of a function alone, and gives the same gradients to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.recompute import recomputed
from megatron.planner.live_memory import LiveMemory

Function = Callable[[Tensor, Tensor], Tensor]
ELEMENTS = 1000


def chain(x: Tensor, weight: Tensor) -> Tensor:
    return ((x * weight).exp() * weight).sin().cos() * x


def nested(x: Tensor, weight: Tensor) -> Tensor:
    return recomputed(chain, recomputed(chain, x * 2.0, weight).tanh(), weight).exp()


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ELEMENTS, generator=generator).requires_grad_() for _ in range(2))  # type: ignore[return-value]


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return chain(chain(x * 2.0, weight).tanh(), weight).exp()


@pytest.mark.parametrize(("function", "kept"), [(chain, chain), (nested, plain)])
def test_gradients_and_memory(function: Function, kept: Function) -> None:
    (x, weight), ones = leaves(), torch.ones(ELEMENTS)
    expected = torch.autograd.grad(kept(x, weight), (x, weight), ones)
    with LiveMemory() as live:
        out = recomputed(function, x, weight)
        assert live.now <= ones.nbytes  # the result: arguments were there before
        found = torch.autograd.grad(out, (x, weight), ones, retain_graph=True)
        again = torch.autograd.grad(out, (x, weight), ones)
    for one, two, three in zip(expected, found, again, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_without_gradients() -> None:
    x, weight = leaves()
    with torch.no_grad():
        assert torch.equal(recomputed(chain, x, weight), chain(x, weight))


def test_another_run_is_reported() -> None:
    x, _ = leaves()
    sizes = iter((ELEMENTS, 10))

    def varying(x: Tensor) -> Tensor:
        return x[: next(sizes)].exp().sin()

    with pytest.raises(RuntimeError, match="recomputation saves"):
        recomputed(varying, x).sum().backward()
