"""RG-LRU: the formula, packed documents, generation, initial values, and greedy text of RecurrentGemma. The tests of
Hugging Face families compare logits and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import Batch, BatchContext
from megatron.core.compiled_regions import region
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.rg_lru.rg_lru import bounded_root, gated_inputs
from tests.extensions.recurrences import EXACT, ModelTests, check_greedy_text, mixer_flops
from tests.gpt_cases import FP64, model_of
from tests.pure.test_regions import check_region, compiles

RG_LRU = model_of("rg-lru")


class TestModel(ModelTests):
    config = RG_LRU
    cached = ((3, 2, 48), (3, 48))


def test_formula() -> None:
    """Token by token, block by block."""
    mixer: Any = GPTModel(RG_LRU, FP64).decoder.layers[3].self_attention
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    x, context = torch.randn(9, 2, 32, dtype=torch.float64), BatchContext.of(Batch.of_tokens(torch.zeros(2, 9).long()))
    gate, inputs = F.linear(x, mixer.in_proj.weight.flatten(0, 1), mixer.in_proj.bias.flatten()).chunk(2, dim=-1)
    padded, of_input, in_bias, of_state, state_bias = torch.cat((torch.zeros(2, 2, 48), inputs)).double(), *mixer.gates
    h, out = torch.zeros(2, 48, dtype=torch.float64), []
    for t in range(9):
        u = (padded[t : t + 3] * mixer.conv_weight[:, 0].t().unsqueeze(1)).sum(0) + mixer.conv_bias
        i, r = (
            torch.cat([u[:, 12 * n : 12 * n + 12] @ weight[n] + bias[n] for n in range(4)], dim=1).sigmoid()
            for weight, bias in ((of_input, in_bias), (of_state, state_bias))
        )
        a = torch.exp(-8 * F.softplus(mixer.decay) * r)
        h = i * u if t == 0 else a * h + (1 - a**2).sqrt() * i * u
        out.append(h * F.gelu(gate[t], approximate="tanh"))
    expected = F.linear(torch.stack(out), mixer.out_proj.weight, mixer.out_proj.bias)
    torch.testing.assert_close(mixer(x, context), expected, **EXACT)


def test_derivative_of_the_root_is_bounded() -> None:
    x = torch.tensor([0.0, 1e-12, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(bounded_root(x).sum(), x)
    torch.testing.assert_close(grad, torch.tensor([1000.0, 1000.0, 1.0, 0.5]).double())


def test_initial_values() -> None:
    mixer: Any = GPTModel(RG_LRU, FP64).decoder.layers[0].self_attention
    kept = torch.exp(-F.softplus(mixer.decay))
    assert 0.9 <= kept.min() < 0.93 and 0.99 < kept.max() <= 0.999


def test_greedy_text_of_recurrent_gemma() -> None:
    check_greedy_text("recurrent_gemma")


def test_flops() -> None:
    """Products per token, thrice: three projections, and both gates of each block."""
    hidden, channels, block = 32, 48, 12
    assert mixer_flops(RG_LRU, "R") == 6 * (3 * hidden * channels + 2 * channels * block)


def region_of_rg_lru(x: Tensor, compiled: bool) -> Tensor:
    bias = torch.linspace(-1, 1, 40, dtype=x.dtype).view(4, 10)
    begins = torch.tensor([[True, True], [False, False], [True, False], [False, False], [False, True]])
    blocks = x.unflatten(-1, (4, 10))
    found = region(gated_inputs, compiled)(x, blocks, 0.5 * blocks, bias, -bias, x[0, 0], begins)
    return torch.cat(found, -1)


@compiles
def test_the_compiled_region_is_the_plain_one() -> None:
    check_region(region_of_rg_lru)
