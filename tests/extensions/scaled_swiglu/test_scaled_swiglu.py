"""Tests of the formula and the gradient of scaled SwiGLU, both in MLPs and in experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron.core.models.gpt.gpt_model import GPTModel
from tests.gpt_cases import FP64, model_of

SCALED = model_of("scaled-swiglu")


@pytest.mark.parametrize("experts", [False, True])
def test_mlps_and_experts_follow_the_formula(experts: bool) -> None:
    more = {"num_experts": 4, "moe_ffn_hidden_size": 8} if experts else {}
    mlp = GPTModel(replace(SCALED, **more), FP64).decoder.layers[0].mlp
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    activation = mlp.experts.activation if experts else mlp.activation
    gate, up = x.chunk(2, dim=-1)
    expected, found = F.silu(0.7 * gate) * 1.3 * up, activation(x)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
