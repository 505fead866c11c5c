"""Lightning attention: the formula, packed documents, generation, rates, and greedy text of MiniMax-Text-01. The tests
of Hugging Face families compare logits and gradients."""

from __future__ import annotations

from math import exp

import pytest
import torch
import torch.nn.functional as F

from megatron.core.batch import Batch, BatchContext
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.lightning_attention.lightning_attention import decay_rates
from tests.extensions import installed
from tests.extensions.recurrences import ModelTests, check_greedy_text, mixer_flops
from tests.gpt_cases import FP64, model_of

LIGHTNING = model_of("lightning")


@pytest.mark.parametrize("number", [0, 3])
def test_formula(number: int) -> None:
    """Token by token, head by head: decay of the state, the sum over heads of the norm, gates; over several chunks."""
    mixer = GPTModel(LIGHTNING, FP64).decoder.layers[number].self_attention
    with torch.no_grad():
        mixer.norm.weight.copy_(torch.rand(32, dtype=torch.float64))
    x, context = torch.randn(9, 2, 32, dtype=torch.float64), BatchContext.of(Batch.of_tokens(torch.zeros(2, 9).long()))
    q, k, v, gate = F.linear(x, mixer.in_proj.weight.flatten(0, 1)).view(9, 2, 8, 4, 4).unbind(3)
    q, k, v = (F.silu(each) for each in (q, k, v))
    outputs = torch.zeros_like(v)
    for head in range(8):
        decay = exp(-(2.0 ** -(head + 1)) * (1 - number / (3 + 1e-5) + 1e-5))
        state = torch.zeros(2, 4, 4, dtype=torch.float64)
        for t in range(9):
            state = decay * state + k[t, :, head, :, None] * v[t, :, head, None]
            outputs[t, :, head] = torch.einsum("bn,bnp->bp", q[t, :, head], state)
    normed = F.rms_norm(outputs.flatten(2), (32,), mixer.norm.weight, 1e-6)
    expected = F.linear(normed * gate.flatten(2).sigmoid(), mixer.out_proj.weight)
    torch.testing.assert_close(mixer(x, context), expected, rtol=1e-10, atol=1e-12)


def test_rates() -> None:
    """Of the heads of all ranks together; those of layers of multi-token prediction are the last layer's."""
    whole = decay_rates(range(8), 1, LIGHTNING, torch.float64, torch.device("cpu"))
    parts = [decay_rates(range(n, n + 2), 1, LIGHTNING, torch.float64, torch.device("cpu")) for n in range(0, 8, 2)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
    last, further = (decay_rates(range(8), n, LIGHTNING, torch.float64, torch.device("cpu")) for n in (3, 4))
    assert (last > 0).all() and torch.equal(last, further) and last.max() < 1e-4 < whole.min()


class TestModel(ModelTests):
    config = LIGHTNING
    cached = ((3, 8, 4, 4),)


@pytest.mark.skipif(not installed("normed_residual"), reason="normed_residual is deleted")
def test_greedy_text_of_minimax() -> None:
    check_greedy_text("minimax")


def test_flops() -> None:
    """Products per token, thrice: both projections, scores in a chunk and what they weigh, states kept and read."""
    hidden, heads, width, chunk = 32, 8, 4, 4
    mixed = heads * width * (2 * chunk + 2 * width)
    sums = 2 * heads * chunk  # of decays, which have no gradient
    assert mixer_flops(LIGHTNING, "L") == 6 * (mixed + 5 * hidden**2) + sums
