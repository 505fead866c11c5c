"""Gated delta nets: chunks against the recurrence, packed documents, and states that go on where a text stopped."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.linear_attention.gated_delta_rule import gated_delta_chunks, gated_delta_steps
from megatron.core.linear_attention.short_convolution import short_convolution

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def operands(length: int, dtype: torch.dtype = torch.float64, decay: float = 0.5) -> list[Tensor]:
    """q, k, v, g, beta of 2 samples, 2 key heads and 6 heads, and a state to begin with."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(length, 2, 2, 5), dim=-1) for _ in range(2))
    g, beta = -decay * normal(length, 2, 6).exp(), normal(length, 2, 6).sigmoid()
    found = [q, k, normal(length, 2, 6, 7), g, beta, normal(2, 6, 5, 7)]
    return [x.to(dtype).requires_grad_() for x in found]


def documents(length: int) -> Tensor:
    """[s, 2]: documents of all kinds, one that begins with the sample, one of one token, some over several chunks."""
    starts = torch.zeros(length, 2, dtype=torch.int64)
    for sample, places in enumerate(((0, 3, 4, 15, 16, 17, 40), (5, 31, 32))):
        starts[[place for place in places if place < length], sample] = 1
    return starts.cumsum(0)


def weighted(results: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in results]).sum()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (9, 64), (48, 16), (53, 16), (70, 64)])
def test_chunks_are_the_recurrence(length: int, chunk: int, packed: bool) -> None:
    *tokens, state = operands(length)
    number = documents(length) if packed else None
    expected = gated_delta_steps(*tokens, number, state)
    found = gated_delta_chunks(*tokens, number, state, chunk)
    torch.testing.assert_close(found, expected, **EXACT)
    gradients = [torch.autograd.grad(weighted(results), [*tokens, state]) for results in (found, expected)]
    torch.testing.assert_close(*gradients, **EXACT)


def test_strong_decay_is_no_overflow() -> None:
    """A chunk over which the state decays by more than the largest number."""
    *tokens, state = operands(64, torch.float32, decay=40.0)
    found, expected = (f(*tokens, None, state) for f in (gated_delta_chunks, gated_delta_steps))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(weighted(found), tokens))


def test_documents_are_computed_apart() -> None:
    *tokens, _ = operands(53)
    whole, _ = gated_delta_chunks(*tokens, documents(53), chunk=16)
    for sample, places in enumerate(((0, 3, 4, 15, 16, 17, 40, 53), (0, 5, 31, 32, 53))):
        for start, stop in pairwise(places):
            alone, _ = gated_delta_chunks(*(x[start:stop, sample : sample + 1] for x in tokens))
            torch.testing.assert_close(whole[start:stop, sample : sample + 1], alone, **EXACT)


@pytest.mark.parametrize("rule", [gated_delta_chunks, gated_delta_steps])
def test_state_goes_on_where_it_stopped(rule: Any) -> None:
    *tokens, state = operands(53)
    number = documents(53)
    expected = rule(*tokens, number, state)
    out, middle = rule(*(x[:20] for x in tokens), number[:20], state)
    rest, final = rule(*(x[20:] for x in tokens), number[20:] - number[19], middle)
    torch.testing.assert_close((torch.cat((out, rest)), final), expected, **EXACT)


def test_convolution() -> None:
    """torch's convolution, without documents and of each document alone; in one go and in two."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(53, 2, 3, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)

    def of_torch(x: Tensor) -> Tensor:
        channels = F.pad(x.flatten(2).permute(1, 2, 0), (3, 0))
        return F.conv1d(channels, weight.view(15, 1, 4), groups=15).permute(2, 0, 1).view_as(x)

    torch.testing.assert_close(short_convolution(x, weight)[0], of_torch(x), **EXACT)
    whole, last = short_convolution(x, weight, documents(53))
    for sample, places in enumerate(((0, 3, 4, 15, 16, 17, 40, 53), (0, 5, 31, 32, 53))):
        for start, stop in pairwise(places):
            part = slice(start, stop), slice(sample, sample + 1)
            torch.testing.assert_close(whole[part], of_torch(x[part]), **EXACT)
    for cut in (1, 2, 17, 33):
        number = documents(53)
        first, before = short_convolution(x[:cut], weight, number[:cut])
        second, behind = short_convolution(x[cut:], weight, number[cut:] - number[cut - 1], before)
        torch.testing.assert_close((torch.cat((first, second)), behind), (whole, last), **EXACT)


def test_sixteen_bits_are_computed_in_fp32() -> None:
    tokens = [x.detach() for x in operands(20)[:-1]]
    rounded = [x.bfloat16() for x in tokens]
    out, state = gated_delta_chunks(*rounded)
    expected = gated_delta_chunks(*(x.float() for x in rounded))
    assert out.dtype == state.dtype == torch.float32
    torch.testing.assert_close((out, state), expected, rtol=1e-2, atol=1e-2)
