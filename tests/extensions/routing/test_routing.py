"""Tests of Sinkhorn routing and of random expert choices. tests/pure/test_moe.py compares all routing methods with
plain implementations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.training.config.flags import with_fields
from tests.moe_cases import MIXTRAL, build_layer, context
from tests.pure.test_moe import B, S, random_input


def test_sinkhorn_balances_each_sequence_only_in_training() -> None:
    config = replace(MIXTRAL, moe_router_load_balancing_type=("sinkhorn",), moe_router_topk=1)
    layer = build_layer(config)
    x = torch.randn(64, B, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 1

    def most(experts: Tensor) -> int:
        return max(int(experts[:, j].flatten().bincount(minlength=8).max()) for j in range(B))

    balanced, plain = layer.router(x, context(B)).experts, layer.eval().router(x, context(B)).experts
    assert most(balanced) <= 12 < 20 < most(plain)  # a perfect balance would be 8 tokens per expert
    assert torch.equal(plain, (x @ layer.router.weight.T).argmax(-1, keepdim=True))


def test_equal_tokens_have_equal_experts_under_sinkhorn_routing() -> None:
    layer = build_layer(replace(MIXTRAL, moe_router_load_balancing_type=("sinkhorn",)))
    x = random_input(MIXTRAL)[:1].expand(S, -1, -1)
    rounded = x * (1 + 1e-15 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3)))
    assert (layer.router(rounded, context(B)).experts == torch.tensor([0, 1])).all()


def test_forced_balance_is_random_by_sample_and_position_and_trains_the_router() -> None:
    config = with_fields(MIXTRAL, {"moe_router_force_load_balancing": True})
    layer, x = build_layer(config), random_input(config)
    with torch.no_grad():
        layer.router.weight[3] += 5.0
    choice = layer.router(x, context(B))
    loads = choice.experts.flatten().bincount(minlength=8)
    assert loads.sum() == 2 * S * B and loads.min() >= 4 and loads.max() <= 22
    later = replace(context(B), sample_index=torch.arange(1, B + 1))
    assert torch.equal(layer.router(x, later).experts[:, :-1], choice.experts[:, 1:])
    weights = torch.autograd.grad(choice.weights[..., 0].sum(), layer.router.weight)[0]
    assert weights.abs().max() > 0.01
    assert not torch.equal(layer.eval().router(x, context(B)).experts, choice.experts)
