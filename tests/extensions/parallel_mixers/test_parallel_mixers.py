"""Attention beside Mamba-2: the sum of both, packed documents, caches of both, and greedy text of Falcon-H1. The tests
of Hugging Face families compare logits and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.batch import Batch, BatchContext
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.parameters import parameter_metas
from megatron.extensions.mamba.flags import MambaFlags
from megatron.extensions.mamba.mamba2 import gated_group_norm
from megatron.extensions.parallel_mixers.flags import ParallelMixerFlags
from megatron.extensions.planner.flops import model_flops
from megatron.training.config.flags import with_fields
from tests.extensions import installed
from tests.extensions.recurrences import ModelTests, check_greedy_text
from tests.gpt_cases import FP64, model_of

SIDE_BY_SIDE = model_of("attention-and-mamba")


class TestModel(ModelTests):
    config = SIDE_BY_SIDE
    cached = ((3, 3, 4, 2 * 5 + 2 * 6), (3, 8, 6, 5))


def test_sum_of_both() -> None:
    """Each with its factors; a factor of keys is one of scores."""
    model = GPTModel(SIDE_BY_SIDE, FP64).eval()
    mixer, x = model.decoder.layers[1].self_attention, torch.randn(9, 2, 32, dtype=torch.float64)
    context = model.decoder._complete(BatchContext.of(Batch.of_tokens(torch.zeros(2, 9).long())), x)
    expected = 0.9 * mixer.attention(1.1 * x, context) + 0.6 * mixer.mamba(1.3 * x, context)
    torch.testing.assert_close(mixer(x, context), expected, rtol=1e-12, atol=1e-12)
    assert mixer.attention.core.scale == pytest.approx(0.7 / 8**0.5)


def test_factors_of_parts_scale_rows_of_the_projection() -> None:
    own = SIDE_BY_SIDE.options(MambaFlags)
    plain = SIDE_BY_SIDE.with_options(replace(own, mamba_multipliers=None))
    mixers = [GPTModel(config, FP64).eval().decoder.layers[0].self_attention.mamba for config in (SIDE_BY_SIDE, plain)]
    rows = torch.tensor(own.mamba_multipliers).double().repeat_interleave(torch.tensor([10, 10, 6, 6, 2]))
    with torch.no_grad():
        mixers[1].in_proj.weight.mul_(rows[:, None])
    x, context = torch.randn(9, 2, 32).double(), BatchContext.of(Batch.of_tokens(torch.zeros(2, 9).long()))
    torch.testing.assert_close(mixers[0](x, context), mixers[1](x, context), rtol=1e-12, atol=1e-12)


def test_norms() -> None:
    """Before or behind the gates, over each group, or none."""
    y, gate = torch.randn(3, 1, 8).double(), torch.randn(3, 1, 2, 4).double()
    weight, silu = torch.rand(8).double(), torch.nn.functional.silu(gate)
    of_groups = y.view(3, 1, 2, 4)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.view(2, 4)

    for of_norm, first, expected in (
        (weight, False, normed(of_groups * silu)),
        (weight, True, normed(of_groups) * silu),
        (None, False, of_groups * silu),
        (None, True, of_groups * silu),
    ):
        torch.testing.assert_close(gated_group_norm(y, gate, of_norm, 1e-5, first), expected.flatten(2))


@pytest.mark.skipif(not installed("scaled_swiglu"), reason="scaled_swiglu is deleted")
def test_greedy_text_of_falcon_h1() -> None:
    check_greedy_text("falcon_h1")


def test_parameters_and_flops_are_those_of_both() -> None:
    both = replace(SIDE_BY_SIDE.with_options(ParallelMixerFlags()), num_layers=1, experimental_attention_variant=None)
    found = {letter: with_fields(both, {"hybrid_layer_pattern": letter}) for letter in "HM*-"}
    flops = {letter: model_flops(config) for letter, config in found.items()}
    head = flops["-"].matmul - 18 * both.hidden_size * both.ffn_size
    assert flops["H"].attention == flops["*"].attention > 0
    assert flops["H"].matmul == flops["M"].matmul + flops["*"].matmul - head
    names = {
        letter: [meta.name.replace(".attention.", ".").replace(".mamba.", ".") for meta in parameter_metas(config)]
        for letter, config in found.items()
    }
    assert {*names["H"]} == {*names["M"], *names["*"]}
