"""What Gemma needs: gated GeLU, norms that multiply by 1 + weight, and scaled word embeddings."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
import torch.nn.functional as F

from megatron.core.batch import Batch
from megatron.core.models.gpt.embedding import rounded
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.transformer.activations import FusedActivation
from megatron.core.transformer.norm import build_norm
from tests.gpt_cases import FP64, GPT, LLAMA
from tests.harness import tp_context


@pytest.mark.parametrize(("kind", "form"), [("geglu", "none"), ("geglu_tanh", "tanh")])
def test_gated_gelu_and_its_gradient(kind: str, form: str) -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(FusedActivation(kind, False)(x), F.gelu(gate, approximate=form) * up)
    assert torch.autograd.gradcheck(lambda x: FusedActivation(kind, False)(x), x)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_norm_of_one_plus_weight_equals_one_whose_weight_is_larger_by_one(
    normalization: str, dtype: torch.dtype
) -> None:
    config, ctx = replace(GPT, normalization=normalization), tp_context(ParallelState(), dtype=torch.float64)
    usual = build_norm("norm", 8, config, ctx)
    ours = build_norm("norm", 8, replace(config, apply_layernorm_1p=True), ctx)
    assert (usual.weight.meta.init.kind, ours.weight.meta.init.kind) == ("ones", "zeros")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(8))
        usual.load_state_dict(ours.state_dict())
        usual.weight += 1
    x = torch.randn(4, 8, dtype=torch.float64)
    expected = usual(x)
    found = ours.to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_word_embeddings_are_scaled_in_the_models_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for hidden in (32, 2048, 3072):
            assert rounded(sqrt(hidden), dtype) == float(torch.tensor(sqrt(hidden), dtype=dtype)), (dtype, hidden)
    tokens = torch.randint(GPT.vocab_size, (2, 5))
    plain, scaled = (GPTModel(replace(LLAMA, scale_word_embeddings=on), FP64).eval() for on in (False, True))
    with torch.no_grad():
        plain.embedding.word_embeddings.weight *= sqrt(32)
        expected = plain.logits(None, Batch.of_tokens(tokens))
        torch.testing.assert_close(scaled.logits(None, Batch.of_tokens(tokens)), expected, rtol=1e-12, atol=1e-12)
