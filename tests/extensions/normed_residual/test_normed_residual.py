"""Layers that add to their normalized inputs: the formula, and the layouts of the matrix beside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.batch import Batch, BatchContext
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.gpt_cases import FP64, model_of, random_batch

NORMED = model_of("normed-residual")


def test_formula() -> None:
    model = GPTModel(NORMED, FP64).eval()
    layer, x = model.decoder.layers[0], torch.randn(9, 2, 32, dtype=torch.float64)
    context = model.decoder._complete(BatchContext.of(Batch.of_tokens(torch.zeros(2, 9).long())), x)
    normed = layer.input_layernorm(x)
    y = layer.pre_mlp_layernorm(1.5 * normed + 0.7 * layer.self_attention(normed, context))
    torch.testing.assert_close(layer(x, context), 1.5 * y + 0.7 * layer.mlp(y, context), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputation(granularity: str) -> None:
    batch, found = random_batch(NORMED), []
    method = {"recompute_method": "uniform", "recompute_num_layers": 1} if granularity == "full" else {}
    for config in (NORMED, replace(NORMED, recompute_granularity=granularity, **method)):
        model = GPTModel(config, FP64).train()
        found.append(torch.autograd.grad(model(None, batch), [*model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
