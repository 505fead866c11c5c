"""Tests of Mamba-2. The chunked computation is compared with the recurrence, and initial values are checked. The tests
in tests/extensions/hugging_face compare logits, gradients and greedy text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import HARDWARE
from megatron.extensions.mixers.linear_attention.gated_delta_rule import Chunks
from megatron.extensions.mixers.mamba.flags import MambaFlags, group_channels, num_heads
from megatron.extensions.mixers.mamba.mamba2 import gated_group_norm, mamba_operands
from megatron.extensions.mixers.mamba.ssd import operands_in_chunks, ssd_chunks, ssd_of_chunks, ssd_steps
from megatron.extensions.plan.planner.flops import model_flops
from megatron.training.config.flags import with_fields
from tests.extensions.recurrences import check_chunks, check_strong_decay, documents, weighted
from tests.gpt_cases import FP64, model_of
from tests.pure.test_regions import check_region, compiles

MAMBA = model_of("mamba")


def operands(length: int, dtype: torch.dtype = torch.float64, decay: float = 0.5) -> list[Tensor]:
    """Return x, dt, a, B and C for 2 samples, 2 groups and 6 heads, and an initial state."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, dt, a = normal(length, 2, 6, 7), F.softplus(normal(length, 2, 6)), -decay * normal(6).exp()
    found = [x, dt, a, normal(length, 2, 2, 5), normal(length, 2, 2, 5), normal(2, 6, 5, 7)]
    return [t.to(dtype).requires_grad_() for t in found]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (9, 64), (48, 16), (53, 16), (70, 64)])
def test_chunks_match_the_recurrence(length: int, chunk: int, packed: bool) -> None:
    check_chunks(ssd_chunks, ssd_steps, operands(length), chunk, packed)


def test_strong_decay_does_not_overflow() -> None:
    check_strong_decay(ssd_chunks, ssd_steps, operands(64, torch.float32, decay=40.0))


def test_fp16_is_computed_in_fp32() -> None:
    rounded = [x.detach().half() for x in operands(20)[:-1]]
    found = ssd_chunks(*rounded)
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(found, ssd_chunks(*(x.float() for x in rounded)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", [0.02, 0.5])
def test_products_in_bf16_are_within_their_stated_error(decay: float, packed: bool) -> None:
    """Apart from fp32 rounding, the differences from fp64 results are bounded as follows, where u is the rounding unit
    of bf16. The bound is ((1 + u)^3 - 1) Y* for outputs and u S* for states, where Y* and S* are computed from absolute
    values. The bound for a gradient is 3 u times the norm of the gradient."""
    length, unit = 150, 2.0**-8
    rounded = [x.detach().bfloat16() for x in operands(length, decay=decay)[:-1]]
    rounded[1:3] = (x.float() for x in rounded[1:3])  # dt and a are fp32, as in the mixer
    number = documents(length) if packed else None
    own = [x.clone().requires_grad_() for x in rounded]
    exact = [x.double().requires_grad_() for x in rounded]
    largest = [x.double() if place in (1, 2) else x.double().abs() for place, x in enumerate(rounded)]
    found = ssd_chunks(*own, number, None, Chunks(64))
    expected, bounds = (ssd_steps(*tensors, number) for tensors in (exact, largest))
    assert {x.dtype for x in found} == {torch.float32}
    for one, right, most, bound in zip(found, expected, bounds, ((1 + unit) ** 3 - 1, unit), strict=True):
        error = (one - right).abs()
        assert (error <= (bound + 2.0**-16) * most).all()
        assert error.max() > 2.0**-13 * right.abs().mean(), "nothing was rounded"
    grads = [torch.autograd.grad(weighted(results), tensors) for results, tensors in ((found, own), (expected, exact))]
    for name, grad, right in zip(("x", "dt", "a", "B", "C"), *grads, strict=True):
        assert (grad - right).norm() <= 3 * unit * right.norm(), name


def test_the_input_is_added_with_its_factor() -> None:
    *tokens, state = operands(53)
    direct = torch.randn(6, dtype=torch.float64, requires_grad=True)
    found, _ = ssd_of_chunks(operands_in_chunks(*tokens, 16), None, state, HARDWARE, direct, torch.float64)
    found = found[:53]
    expected = ssd_steps(*tokens, None, state)[0] + direct[:, None] * tokens[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    grads = [torch.autograd.grad(weighted((y,)), [*tokens, direct]) for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_initial_values() -> None:
    """As in Megatron-LM, initial step sizes range from 0.001 to 0.1, and initial decay rates range from 1 to 16."""
    model = GPTModel(MAMBA.with_options(replace(MAMBA.options(MambaFlags), mamba_num_heads=512)), FP64)
    mixer: Any = model.decoder.layers[0].self_attention
    steps, decay = F.softplus(mixer.dt_bias), mixer.a_log.exp()
    assert 1e-3 < steps.min() < 1.2e-3 and 0.08 < steps.max() < 0.1 and 0.007 < steps.log().mean().exp() < 0.014
    assert 1 < decay.min() < 1.2 and 15.5 < decay.max() < 16
    assert (mixer.d == 1).all() and (mixer.norm == 1).all()


def test_flops() -> None:
    """The test counts the FLOPs per token of a sample with several chunks. The backward pass needs twice as many FLOPs
    as the forward pass for the scores of a group, the weighted sums, the writes and reads of the states, and the
    projections."""
    own = replace(MAMBA.options(MambaFlags), mamba_chunk_size=8)
    shape = {"num_layers": 1, "hybrid_layer_pattern": "M", "seq_length": 32}
    one = with_fields(MAMBA.with_options(own), shape)
    none = with_fields(one, {"hybrid_layer_pattern": "-"})
    heads, width, states, chunk = num_heads(one), own.mamba_head_dim, own.mamba_state_dim, own.mamba_chunk_size
    mixed = own.mamba_num_groups * chunk * states + heads * width * (chunk + 2 * states)
    projections = one.hidden_size * (own.mamba_num_groups * sum(group_channels(one)) + heads * width)
    mlp = 2 * one.hidden_size * one.ffn_size
    sums = 2 * 2 * heads * chunk  # FLOPs of the sums of decays in the forward and backward passes
    assert model_flops(one).matmul - model_flops(none).matmul == 6 * (mixed + projections - mlp) + sums
    assert model_flops(one).attention == 0


def region_of_mamba(x: Tensor, compiled: bool) -> Tensor:
    mixed, number = x.unflatten(-1, (2, 20)), torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]).t()
    weight, bias = (torch.linspace(-1, 1, 36 * n, dtype=x.dtype) for n in (3, 1))
    operands, _ = region(mamba_operands, compiled)(
        mixed, weight.view(2, 18, 3), bias.view(2, 18), mixed[0, 0, :, :2].flatten(), (8, 5, 4), 0.6, number, None
    )
    out = region(gated_group_norm, compiled)(operands[0].flatten(2), mixed[..., :8], weight[:16], 1e-5)
    return torch.cat([part.flatten(2) for part in (*operands, out)], -1)


@compiles
def test_the_compiled_region_matches_the_plain_one() -> None:
    check_region(region_of_mamba)
