"""Kimi Delta Attention: chunks against the recurrence and against transformers, packed documents, generation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.core.batch import Batch, BatchContext
from megatron.core.compiled_regions import region
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.kimi_delta_attention.kimi_delta_attention import sigmoid_gated_norm
from megatron.extensions.linear_attention.gated_delta_rule import gated_delta_chunks, gated_delta_steps
from tests.extensions import installed
from tests.extensions.recurrences import (
    EXACT,
    ModelTests,
    check_chunks,
    check_greedy_text,
    check_strong_decay,
    delta_operands,
    mixer_flops,
    weighted,
)
from tests.gpt_cases import FP64, model_of
from tests.pure.test_regions import check_region, compiles

KIMI = model_of("kimi-delta")


operands = partial(delta_operands, 3, (3, 5))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (9, 64), (48, 16), (53, 24), (70, 64)])
def test_chunks_are_the_recurrence(length: int, chunk: int, packed: bool) -> None:
    """Chunks of one block and of several, some of them not whole."""
    check_chunks(gated_delta_chunks, gated_delta_steps, operands(length), chunk, packed)


def test_recurrence() -> None:
    """The formula, head by head: states decay by channel, and take the value at a key in place of what they had."""
    *tokens, state = (x.detach() for x in operands(9))
    found, final = gated_delta_steps(*tokens, None, state)
    for sample in range(2):
        for head in range(3):
            S = state[sample, head]
            for t in range(9):
                q, k, v, g, beta = (x[t, sample, head] for x in tokens)
                S = torch.diag(g.exp()) @ S
                S = S + beta * torch.outer(k, v - S.T @ k)
                torch.testing.assert_close(found[t, sample, head], S.T @ q / 5**0.5, **EXACT)
            torch.testing.assert_close(final[sample, head], S, **EXACT)


def test_strong_decay_is_no_overflow() -> None:
    """Of a chunk, and of a block."""
    check_strong_decay(gated_delta_chunks, gated_delta_steps, operands(64, torch.float32, decay=40.0))


class TestModel(ModelTests):
    config = KIMI
    cached = ((3, 2, 8, 15), (3, 8, 5, 5))


@pytest.mark.skipif(not installed("latent_attention"), reason="latent_attention is deleted")
def test_greedy_text_of_kimi_linear() -> None:
    check_greedy_text("kimi_linear")


def test_layer_of_kimi_linear() -> None:
    """Output and every gradient of a layer of transformers with the same weights, in fp64 throughout."""
    pytest.importorskip("transformers")
    hf_exact = pytest.importorskip("tests.extensions.hugging_face.hf_exact", reason="hugging_face is deleted")
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    sizes = {"linear_head_dim": 5, "linear_num_heads": 8, "linear_conv_kernel_dim": 3}
    config = kimi.KimiLinearConfig(hidden_size=32, num_hidden_layers=2, layer_types=["linear_attention"] * 2, **sizes)
    mixer = GPTModel(KIMI, FP64).decoder.layers[0].self_attention
    mixer.eps = config.rms_norm_eps
    x = torch.randn(70, 2, 32, dtype=torch.float64, requires_grad=True)
    with hf_exact.fp64():
        theirs = kimi.KimiLinearDeltaAttention(config, 0)
        qkv, beta = mixer.in_proj.weight.split((15, 1), 1)
        convolved = mixer.conv1d.unflatten(1, (3, 5)).transpose(0, 1).flatten(0, 2)
        named = {
            **{f"{n}_proj.weight": w.flatten(0, 1) for n, w in zip("qkv", qkv.split(5, 1), strict=True)},
            **{"b_proj.weight": beta.flatten(0, 1), "conv1d.weight": convolved.unsqueeze(1)},
            **{"forget_gate.f_a_proj.weight": mixer.f_a_proj.weight, "g_a_proj.weight": mixer.g_a_proj.weight},
            **{"forget_gate.f_b_proj.weight": mixer.f_b_proj.weight.flatten(0, 1)},
            **{"g_b_proj.weight": mixer.g_b_proj.weight.flatten(0, 1), "o_proj.weight": mixer.out_proj.weight},
            **{"forget_gate.dt_bias": mixer.dt_bias.flatten(), "o_norm.weight": mixer.out_norm},
            **{"forget_gate.A_log": mixer.a_log.view(1, 1, -1, 1)},
        }
        assert named.keys() == dict(theirs.named_parameters()).keys()
        expected = torch.func.functional_call(theirs, named, (x.transpose(0, 1),)).transpose(0, 1)
    found = mixer(x, BatchContext.of(Batch.of_tokens(torch.zeros(2, 70).long())))
    assert (found - expected).norm() < 1e-9 * expected.norm()
    weights = [x, *mixer.parameters()]
    pairs = zip(*(torch.autograd.grad(weighted((y,)), weights) for y in (found, expected)), strict=True)
    assert all((one - two).norm() < 1e-9 * two.norm() for one, two in pairs)


def test_flops() -> None:
    """Products per token of a sample of one block, thrice: projections, those of low rank, and those of a chunk whose
    scores are sums over channels, no products."""
    hidden, heads, width, chunk = 32, 8, 5, 16
    projections = hidden * heads * (3 * width + 1) + 2 * width * (hidden + heads * width) + heads * width * hidden
    mixed = heads * (3 * chunk * width + 3 * width**2)
    found = mixer_flops(KIMI, "K", seq_length=16) - 6 * projections
    assert 6 * mixed <= found <= 7 * mixed + 2 * heads * (chunk * width + 2 * chunk**2)


def region_of_gates(x: Tensor, compiled: bool) -> Tensor:
    heads = x.unflatten(-1, (-1, 4))
    return region(sigmoid_gated_norm, compiled)(heads, heads * 2, torch.linspace(-1, 1, 4, dtype=x.dtype), 1e-5)


@compiles
def test_the_compiled_region_is_the_plain_one() -> None:
    check_region(region_of_gates)
