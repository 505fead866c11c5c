"""What plans say of gated delta nets, and their compiled regions."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.extensions.linear_attention.gated_delta_net import delta_operands, gated_norm
from megatron.extensions.planner.flops import model_flops
from megatron.training.config.flags import with_fields
from tests.pure import test_regions as regions
from tests.pure.test_model_math import DELTA_NET, LLAMA, shape
from tests.pure.test_regions import compiles


def test_flops_of_gated_delta_nets() -> None:
    """Of two chunks of 64 tokens, per token: products of [64, 64] by [64, d] and those with the state, thrice; twice
    the sums of decays, and the gradient of the solution. What the backward computes again does not count."""
    config = with_fields(TransformerConfig(**shape(1, 32, 4, 64, 128, 128)), LLAMA | DELTA_NET)
    plain = TransformerConfig(**shape(1, 32, 4, 64, 128, 128), **LLAMA)
    chunk, keys, heads, dk, dv = 64, 4, 8, 6, 5
    products = 2 * keys * chunk * dk + heads * (2 * chunk * dv + chunk * dk + 3 * dk * dv)
    projections = 32 * (keys * (2 * dk) + heads * (2 * dv + 2)) + heads * dv * 32 - 4 * 32 * 32
    once = heads * (2 * chunk + chunk**2)
    assert model_flops(config).matmul - model_flops(plain).matmul == 6 * (products + projections) + 2 * once
    assert model_flops(config).attention == 0


def delta_net(x: Tensor, compiled: bool) -> Tensor:
    mixed, number = x.unflatten(-1, (2, 20)), torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]).t()
    weights = torch.linspace(-1, 1, 2 * 16 * 3, dtype=x.dtype).view(2, 16, 3), *mixed[0, 0, :, 0:4].unbind()
    operands = region(delta_operands, compiled)(
        mixed[..., :16], mixed[..., 16:18].flatten(2), mixed[..., 18:].flatten(2), *weights, (4, 4), number, None
    )
    q, k, v, g, beta = operands[0]
    out = region(gated_norm, compiled)(v, v * 2, weights[1], 1e-5)
    return torch.cat([part.flatten(2) for part in (q, k, g, beta, out)], -1)


regions.REGIONS["delta net"] = delta_net


@compiles
def test_the_compiled_region_is_the_plain_one() -> None:
    regions.test_a_compiled_region_is_the_plain_one("delta net")
