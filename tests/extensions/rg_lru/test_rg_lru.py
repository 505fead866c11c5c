"""Tests of the initial values, the FLOPs and the compiled region of RG-LRU. The tests in tests/extensions/hugging_face
compare logits, gradients and greedy text."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.mixers.rg_lru.rg_lru import bounded_root, gated_inputs
from tests.extensions.recurrences import mixer_flops
from tests.gpt_cases import FP64, model_of
from tests.pure.test_regions import check_region, compiles

RG_LRU = model_of("rg-lru")


def test_derivative_of_the_square_root_is_bounded() -> None:
    x = torch.tensor([0.0, 1e-12, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(bounded_root(x).sum(), x)
    torch.testing.assert_close(grad, torch.tensor([1000.0, 1000.0, 1.0, 0.5]).double())


def test_initial_values() -> None:
    mixer: Any = GPTModel(RG_LRU, FP64).decoder.layers[0].self_attention
    kept = torch.exp(-F.softplus(mixer.decay))
    assert 0.9 <= kept.min() < 0.93 and 0.99 < kept.max() <= 0.999


def test_flops() -> None:
    """The FLOPs per token are three times those of the forward pass. The forward pass consists of three projections and
    both gates of each block."""
    hidden, channels, block = 32, 48, 12
    assert mixer_flops(RG_LRU, "R") == 6 * (3 * hidden * channels + 2 * channels * block)


def region_of_rg_lru(x: Tensor, compiled: bool) -> Tensor:
    bias = torch.linspace(-1, 1, 40, dtype=x.dtype).view(4, 10)
    begins = torch.tensor([[True, True], [False, False], [True, False], [False, False], [False, True]])
    blocks = x.unflatten(-1, (4, 10))
    found = region(gated_inputs, compiled)(x, blocks, 0.5 * blocks, bias, -bias, x[0, 0], begins)
    return torch.cat(found, -1)


@compiles
def test_the_compiled_region_matches_the_plain_one() -> None:
    check_region(region_of_rg_lru)
