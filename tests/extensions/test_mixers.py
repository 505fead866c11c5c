"""Tests of recomputation, packed documents and 16-bit precision, for tiny models with mixers instead of attention.
test_kv_cache tests the mixers' caches in generation."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.gpt_cases import FP64, STYLES, check_documents_apart, packed_documents, random_batch

RECURRENT = (
    *("delta-net", "delta-product", "kimi-delta", "lightning", "convolution"),
    *("mamba", "attention-and-mamba", "mamba1", "rg-lru"),
)
MIXERS = [style for style in (*RECURRENT, "compressed") if style in STYLES]
"""Mixers provided by installed extensions."""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("style", [style for style in RECURRENT if style in STYLES])
def test_recomputation_and_packed_documents_change_no_result(style: str, packed: bool) -> None:
    """The logits of packed documents equal the logits of the same documents processed one by one. With recomputation,
    loss and gradients stay the same."""
    batch = random_batch(STYLES[style], **(packed_documents(STYLES[style]) if packed else {}))
    gradients = []
    for training in (True, False):
        model = GPTModel(STYLES[style], FP64).train(training)
        loss = model(None, batch)
        gradients.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    if packed:
        check_documents_apart(model, batch)


@pytest.mark.parametrize("style", MIXERS)
def test_half_precision_follows_single(style: str) -> None:
    half, single = (
        GPTModel(STYLES[style], parallel)(None, random_batch(STYLES[style])).item()
        for parallel in (ModelParallelConfig(bf16=True), ModelParallelConfig(fp32=True))
    )
    assert abs(half / single - 1) < 0.01
