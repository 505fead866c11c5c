"""Tests of Mamba-1. The scan is compared with the recurrence, and initial values are checked. The tests in
tests/extensions/hugging_face compare logits, gradients and greedy text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.mixers.mamba1 import selective_scan as scan
from tests.extensions.recurrences import EXACT, check_strong_decay, documents, mixer_flops, weighted
from tests.gpt_cases import FP64, model_of

MAMBA1 = model_of("mamba1")


def operands(length: int, decay: float = 0.5) -> list[Tensor]:
    """Return random operands x, dt, a, B and C for 2 samples, 6 channels and 5 states, followed by an initial state."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, dt, a = normal(length, 2, 6), F.softplus(normal(length, 2, 6)), -decay * normal(6, 5).exp()
    return [t.requires_grad_() for t in (x, dt, a, normal(length, 2, 5), normal(length, 2, 5), normal(2, 6, 5))]


def token_by_token(
    x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, number: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    out = []
    for t in range(len(x)):
        if number is not None:
            before = torch.zeros_like(number[0]) if t == 0 else number[t - 1]
            state = state.masked_fill((number[t] != before)[:, None, None], 0.0)
        written = (dt[t] * x[t]).unsqueeze(-1) * B[t].unsqueeze(1)
        state = state * (dt[t].unsqueeze(-1) * a).exp() + written
        out.append((state * C[t].unsqueeze(1)).sum(-1))
    return torch.stack(out), state


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "at_a_time"), [(1, 2**26), (13, 2**26), (48, 2**26), (53, 300), (60, 700)])
def test_the_scan_matches_the_recurrence(
    length: int, at_a_time: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan processes the channels in one part or in several parts. Sequences of prime length form a single chunk.
    Other sequences are divided into equal chunks."""
    monkeypatch.setattr(scan, "MOST_STATES", at_a_time)
    *tokens, state = operands(length)
    number = documents(length) if packed else None
    expected = token_by_token(*tokens, number, state)
    found = scan.selective_scan(*tokens, number, state)
    torch.testing.assert_close(found, expected, **EXACT)
    gradients = [torch.autograd.grad(weighted(results), [*tokens, state]) for results in (found, expected)]
    torch.testing.assert_close(*gradients, **EXACT)


def test_strong_decay_does_not_overflow() -> None:
    inputs = [t.detach().float().requires_grad_() for t in operands(64, decay=40.0)]
    check_strong_decay(scan.selective_scan, token_by_token, inputs)


def test_sixteen_bits_are_computed_in_fp32() -> None:
    rounded = [x.detach().bfloat16() for x in operands(20)[:-1]]
    found = scan.selective_scan(*rounded)
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(found, scan.selective_scan(*(x.float() for x in rounded)))


def test_initial_values() -> None:
    """As in Mamba, the initial decays of each channel range from 1 to the number of states. The initial step sizes
    range from 0.001 to 0.1."""
    mixer: Any = GPTModel(replace(MAMBA1, hidden_size=64), FP64).decoder.layers[0].self_attention
    decays = torch.arange(1, 6, dtype=torch.float64).expand(48, 5)
    torch.testing.assert_close(mixer.a_log.exp().view(48, 5), decays, rtol=1e-14, atol=0)
    steps = F.softplus(mixer.dt_bias)
    assert 1e-3 < steps.min() < 3e-3 and 0.05 < steps.max() < 0.1
    assert 0.4 < mixer.dt_weight.abs().max() <= 3**-0.5 and (mixer.d == 1).all()


def test_flops() -> None:
    """The FLOPs of the three projections in a step are three times those of the forward pass. Reading the states is one
    GEMM in the forward pass. In the backward pass, there are three GEMMs of the same size: for the gradients of the
    inputs, B and C."""
    hidden, channels, states, rank = 32, 48, 5, 3
    projections = 3 * hidden * channels + channels * (rank + 2 * states) + channels * rank
    read = 2 * channels * states * (1 + 3)
    assert mixer_flops(MAMBA1, "S") == 6 * projections + read
