"""Tests of combinations of model components that no published model family uses. The combinations of published families
are tested in extensions/hugging_face/test_hf_parity.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import BatchContext
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.transformer.norm import build_query_key_norms
from tests.gpt_cases import FP64, GPT, random_batch
from tests.harness import tp_context

BASE = replace(GPT, position_embedding_type="none", residual_multiplier=0.7)
SIDE_BY_SIDE = replace(BASE, parallel_residual=True, parallel_residual_shared_norm=True, norm_placement="sandwich")


def one_norm_and_norms_of_outputs(layer: Any, x: Tensor, context: BatchContext) -> Tensor:
    normed = layer.input_layernorm(x)
    attended = layer.post_attention_layernorm(layer.self_attention(normed, context))
    return x + 0.7 * (attended + layer.post_mlp_layernorm(layer.mlp(normed, context)))


def norms_of_sums(layer: Any, x: Tensor, context: BatchContext) -> Tensor:
    x = layer.post_attention_layernorm(x + 0.7 * layer.self_attention(x, context))
    return layer.post_mlp_layernorm(x + 0.7 * layer.mlp(x, context))


@pytest.mark.parametrize(
    ("config", "formula"),
    [(SIDE_BY_SIDE, one_norm_and_norms_of_outputs), (replace(BASE, norm_placement="sum"), norms_of_sums)],
)
def test_a_layer_matches_its_formula(config: Any, formula: Callable[[Any, Tensor, BatchContext], Tensor]) -> None:
    model = with_random_parameters(GPTModel(config, FP64))
    layer, context = model.decoder.layers[0], BatchContext.of(random_batch(config))
    x = torch.randn(config.seq_length, 3, config.hidden_size, dtype=torch.float64, requires_grad=True)
    found, expected = layer(x, context), formula(layer, x, context)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_found, of_expected = (torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_head_norms_center_like_the_other_norms(normalization: str) -> None:
    scope: dict[str, Any] = {"qk_layernorm": True, "qk_layernorm_scope": "each", "apply_layernorm_1p": True}
    config = replace(GPT, normalization=normalization, **scope)
    norm, _ = build_query_key_norms("attention", config, tp_context(ParallelState()))
    x = torch.randn(5, 2, *norm.weight.shape, dtype=torch.float64)
    weight = norm.weight.data.normal_().view(x.shape[2:]) + 1
    function = F.layer_norm if normalization == "LayerNorm" else F.rms_norm
    torch.testing.assert_close(norm(x), function(x, x.shape[-1:], eps=config.norm_epsilon) * weight)


@pytest.mark.parametrize("untied", [False, True])
def test_logit_biases_are_scaled_with_the_logits(untied: bool) -> None:
    config = replace(GPT, add_output_layer_bias=True, logits_scaling=3.0, untie_embeddings_and_output_weights=untied)
    model = with_random_parameters(GPTModel(config, FP64))
    weight = (model.output_layer if untied else model.embedding.word_embeddings).weight
    x = torch.randn(4, 2, config.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(model.output_layer(x), F.linear(x, weight, model.output_layer.bias) / 3)


def with_random_parameters(model: GPTModel) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return model
