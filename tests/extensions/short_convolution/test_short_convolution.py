"""Short convolutions: the formula, packed documents, generation, and greedy text of LFM2. The tests of Hugging Face
families compare logits and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import Batch, BatchContext
from megatron.core.compiled_regions import region
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.short_convolution.short_convolution import convolved
from tests.extensions.recurrences import ModelTests, check_greedy_text, mixer_flops
from tests.gpt_cases import FP64, model_of
from tests.pure.test_regions import check_region, compiles

CONVOLUTION = model_of("convolution")


def test_formula() -> None:
    """torch's convolution of channels apart, between two gates."""
    mixer = GPTModel(CONVOLUTION, FP64).decoder.layers[0].self_attention
    x, context = torch.randn(9, 2, 32, dtype=torch.float64), BatchContext.of(Batch.of_tokens(torch.zeros(2, 9).long()))
    B, C, values = F.linear(x, mixer.in_proj.weight.flatten(0, 1), mixer.in_proj.bias.flatten()).chunk(3, -1)
    inputs = F.pad((B * values).permute(1, 2, 0), (2, 0))
    y = F.conv1d(inputs, mixer.conv_weight, mixer.conv_bias, groups=32).permute(2, 0, 1)
    expected = F.linear(C * y, mixer.out_proj.weight, mixer.out_proj.bias)
    torch.testing.assert_close(mixer(x, context), expected, rtol=1e-12, atol=1e-12)


class TestModel(ModelTests):
    config = CONVOLUTION
    cached = ((3, 2, 32),)


def test_greedy_text_of_lfm2() -> None:
    check_greedy_text("lfm2")


def test_parameters_of_lfm2() -> None:
    """As many as transformers makes of the published sizes of LFM2-1.2B, whose MLPs are 8,192 wide."""
    transformers = pytest.importorskip("transformers")
    read_config = pytest.importorskip("megatron.extensions.hugging_face.read_config", reason="hugging_face is deleted")
    theirs = transformers.Lfm2Config(
        hidden_size=2048, num_hidden_layers=16, block_ff_dim=12288, full_attn_idxs=[2, 5, 8, 10, 12, 14]
    )
    config = read_config.config_from_hf(theirs.to_dict())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert config.ffn_size == 8192 and config.linear_pattern.count(False) == 6
    assert count_parameters(config).total == sum(each.numel() for each in model.parameters()) == 1170340608


def test_flops() -> None:
    """Products of both projections; a convolution has none."""
    assert mixer_flops(CONVOLUTION, "C") == 6 * 4 * CONVOLUTION.hidden_size**2


def region_of_convolution(x: Tensor, compiled: bool) -> Tensor:
    number = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]).t()
    weight = torch.linspace(-1, 1, 3 * x.shape[-1], dtype=x.dtype).view(-1, 1, 3)
    return region(convolved, compiled)(x, weight, weight[:, 0, 1], number, None)[0]


@compiles
def test_the_compiled_region_is_the_plain_one() -> None:
    check_region(region_of_convolution)
