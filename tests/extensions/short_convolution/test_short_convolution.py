"""Tests of the FLOPs and the compiled region of short convolutions. The tests in tests/extensions/hugging_face compare
logits, gradients and greedy text."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.extensions.mixers.short_convolution.short_convolution import convolved
from tests.extensions.recurrences import mixer_flops
from tests.gpt_cases import model_of
from tests.pure.test_regions import check_region, compiles

CONVOLUTION = model_of("convolution")


def test_flops() -> None:
    """The FLOPs include only the two projections, not the convolution."""
    assert mixer_flops(CONVOLUTION, "C") == 6 * 4 * CONVOLUTION.hidden_size**2


def region_of_convolution(x: Tensor, compiled: bool) -> Tensor:
    number = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]).t()
    weight = torch.linspace(-1, 1, 3 * x.shape[-1], dtype=x.dtype).view(-1, 1, 3)
    return region(convolved, compiled)(x, weight, weight[:, 0, 1], number, None)[0]


@compiles
def test_the_compiled_region_matches_the_plain_one() -> None:
    check_region(region_of_convolution)
