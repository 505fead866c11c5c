"""Helpers for tests of linear attention. The helpers create operands and packed documents, reduce all results to a
scalar, compare chunked computations with recurrences, and count FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.extensions.mixers.linear_attention.gated_delta_rule import Chunks
from megatron.extensions.plan.planner.flops import model_flops
from megatron.training.config.flags import with_fields

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def documents(length: int) -> Tensor:
    """Return the document numbers [s, 2] of the tokens in two samples. Some documents have a single token, and some
    span several chunks."""
    starts = torch.zeros(length, 2, dtype=torch.int64)
    for sample, places in enumerate(((0, 3, 4, 15, 16, 17, 40), (5, 31, 32))):
        starts[[place for place in places if place < length], sample] = 1
    return starts.cumsum(0)


def weighted(results: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in results]).sum()


def delta_operands(
    key_heads: int, decays: tuple[int, ...], length: int, dtype: torch.dtype = torch.float64, decay: float = 0.5
) -> list[Tensor]:
    """Return q, k, v, g and beta of the delta rule for 2 samples, and an initial state. `decays` is (heads,), or
    (heads, channels of a key) if each channel has its own decay."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads = decays[0]
    q, k = (F.normalize(normal(length, 2, key_heads, 5), dim=-1) for _ in range(2))
    g, beta = -decay * normal(length, 2, *decays).exp(), normal(length, 2, heads).sigmoid()
    found = [q, k, normal(length, 2, heads, 7), g, beta, normal(2, heads, 5, 7)]
    return [x.to(dtype).requires_grad_() for x in found]


Rule = Callable[..., tuple[Tensor, Tensor]]


def check_chunks(chunks: Rule, steps: Rule, operands: list[Tensor], chunk: int, packed: bool) -> None:
    """Assert that a chunked rule equals the recurrence, including its gradients."""
    *tokens, state = operands
    number = documents(len(tokens[0])) if packed else None
    expected = steps(*tokens, number, state)
    found = chunks(*tokens, number, state, Chunks(chunk))
    torch.testing.assert_close(found, expected, **EXACT)
    gradients = [torch.autograd.grad(weighted(results), operands) for results in (found, expected)]
    torch.testing.assert_close(*gradients, **EXACT)


def check_strong_decay(chunks: Rule, steps: Rule, operands: list[Tensor]) -> None:
    """Assert that the chunked computation does not overflow if the state decays within a chunk by more than the largest
    representable factor."""
    *tokens, state = operands
    found, expected = (rule(*tokens, None, state) for rule in (chunks, steps))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(weighted(found), tokens))


def mixer_flops(config: TransformerConfig, letter: str, **more: Any) -> int:
    """Return the GEMM FLOPs per token of one mixer layer. This number is the difference between a model with the mixer
    layer and a model with only a gated MLP."""
    one = with_fields(config, {"num_layers": 1, "hybrid_layer_pattern": letter, **more})
    mlp = model_flops(with_fields(one, {"hybrid_layer_pattern": "-"})).matmul - 6 * 3 * one.hidden_size * one.ffn_size
    assert model_flops(one).attention == 0
    return model_flops(one).matmul - mlp
