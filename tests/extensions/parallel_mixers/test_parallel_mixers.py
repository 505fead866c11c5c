"""Tests of layers in which attention runs in parallel with Mamba-2. The tests cover gates without a norm, parameter
counts and FLOPs. The tests in tests/extensions/hugging_face compare logits, gradients and greedy text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.mixers.mamba.mamba2 import gated_group_norm
from megatron.extensions.mixers.parallel_mixers.flags import ParallelMixerFlags
from megatron.extensions.plan.planner.flops import model_flops
from megatron.training.config.flags import with_fields
from tests.gpt_cases import model_of

SIDE_BY_SIDE = model_of("attention-and-mamba")


@pytest.mark.parametrize("first", [False, True])
def test_without_a_norm_gates_multiply(first: bool) -> None:
    y, gate = torch.randn(3, 1, 8).double(), torch.randn(3, 1, 2, 4).double()
    expected = y * torch.nn.functional.silu(gate).flatten(2)
    torch.testing.assert_close(gated_group_norm(y, gate, None, 1e-5, first), expected)


def test_parameters_and_flops_match_both_mixers() -> None:
    both = replace(SIDE_BY_SIDE.with_options(ParallelMixerFlags()), num_layers=1, experimental_attention_variant=None)
    found = {letter: with_fields(both, {"hybrid_layer_pattern": letter}) for letter in "HM*-"}
    flops = {letter: model_flops(config) for letter, config in found.items()}
    head = flops["-"].matmul - 18 * both.hidden_size * both.ffn_size
    assert flops["H"].attention == flops["*"].attention > 0
    assert flops["H"].matmul == flops["M"].matmul + flops["*"].matmul - head
    names = {
        letter: [meta.name.replace(".attention.", ".").replace(".mamba.", ".") for meta in stage_metas(config)]
        for letter, config in found.items()
    }
    assert {*names["H"]} == {*names["M"], *names["*"]}
