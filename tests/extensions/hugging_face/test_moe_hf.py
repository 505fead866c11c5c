"""Our layer against the untouched blocks of `transformers`, in fp32: routing, experts, shared expert, scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.config.model import TransformerConfig
from tests.moe_cases import DEEPSEEK, MIXTRAL, build_layer, context

transformers = pytest.importorskip("transformers")

S, B = 16, 3


def settings(config: TransformerConfig, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": config.hidden_size, "num_experts_per_tok": config.moe_router_topk, "hidden_act": "silu"}
    return sizes | {"experts_implementation": "eager"} | more


def assert_same_output(config: TransformerConfig, theirs: torch.nn.Module) -> None:
    """Gives their block our weights, and both the same tokens."""
    layer = build_layer(config, dtype=torch.float32)
    fc1, fc2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    with torch.no_grad():
        theirs.gate.weight.copy_(layer.router.weight)
        theirs.experts.gate_up_proj.copy_(fc1.flatten(1, 2))
        theirs.experts.down_proj.copy_(fc2)
        if layer.shared_experts is not None:
            if layer.router.balance.expert_bias is not None:
                theirs.gate.e_score_correction_bias.copy_(layer.router.balance.expert_bias)
            gate, up = layer.shared_experts.linear_fc1.weight
            theirs.shared_experts.gate_proj.weight.copy_(gate)
            theirs.shared_experts.up_proj.weight.copy_(up)
            theirs.shared_experts.down_proj.weight.copy_(layer.shared_experts.linear_fc2.weight)
        x = torch.randn(S, B, config.hidden_size, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(layer(x, context(B)), theirs(x), rtol=1e-4, atol=1e-4)


def test_mixtral() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    sizes = settings(MIXTRAL, num_local_experts=8, intermediate_size=24)
    assert_same_output(MIXTRAL, MixtralSparseMoeBlock(MixtralConfig(**sizes)))


@pytest.mark.parametrize(("topk", "groups"), [(2, (1, 1)), (5, (1, 1)), (2, (4, 1)), (4, (4, 2)), (4, (2, 2))])
def test_deepseek_v3(topk: int, groups: tuple[int, int]) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    config = replace(
        DEEPSEEK,
        moe_router_topk=topk,
        moe_shared_expert_intermediate_size=48,
        moe_router_num_groups=groups[0],
        moe_router_group_topk=groups[1],
    )
    sizes = settings(
        config,
        n_routed_experts=8,
        num_local_experts=8,
        moe_intermediate_size=24,
        n_shared_experts=2,
        n_group=groups[0],
        topk_group=groups[1],
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    assert_same_output(config, DeepseekV3MoE(DeepseekV3Config(**sizes)))


def test_qwen2_moe_gates_its_shared_expert() -> None:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock

    config = replace(
        MIXTRAL, moe_router_pre_softmax=True, moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True
    )
    sizes = settings(config, num_experts=8, moe_intermediate_size=24, shared_expert_intermediate_size=40)
    theirs = Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**sizes, norm_topk_prob=False))
    gate = build_layer(config, dtype=torch.float32).shared_experts.gate_weight
    theirs.shared_experts = theirs.shared_expert
    with torch.no_grad():
        theirs.shared_expert_gate.weight.copy_(gate)
    assert_same_output(config, theirs)
