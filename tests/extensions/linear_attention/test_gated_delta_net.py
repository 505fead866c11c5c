"""Tests of gated delta nets. The chunked computation is compared with the recurrence. Further tests cover the use of
flash-linear-attention's kernels, and the validation rules."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import BatchContext
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.extensions.mixers.linear_attention import gated_delta_net
from megatron.extensions.mixers.linear_attention.gated_delta_net import (
    DeltaRows,
    DeltaWeights,
    gated_norm,
    short_convolution,
)
from megatron.extensions.mixers.linear_attention.gated_delta_rule import (
    flash_rule,
    gated_delta_chunks,
    gated_delta_steps,
)
from megatron.extensions.plan.planner.flops import model_flops
from megatron.training.config.flags import with_fields
from tests.extensions.recurrences import EXACT, check_chunks, check_strong_decay, delta_operands, documents, weighted
from tests.gpt_cases import DELTA_NET, FP64, model_of, packed_documents, random_batch
from tests.pure.test_model_math import DELTA_NET as LINEAR
from tests.pure.test_model_math import LLAMA, shape
from tests.pure.test_regions import check_region, compiles

operands = partial(delta_operands, 2, (6,))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (9, 64), (48, 16), (53, 16), (70, 64)])
def test_chunks_match_the_recurrence(length: int, chunk: int, packed: bool) -> None:
    check_chunks(gated_delta_chunks, gated_delta_steps, operands(length), chunk, packed)


def test_strong_decay_does_not_overflow() -> None:
    check_strong_decay(gated_delta_chunks, gated_delta_steps, operands(64, torch.float32, decay=40.0))


def test_convolution_continues_where_it_stopped() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(53, 2, 3, 5, generator=generator, dtype=torch.float64)
    weight, number = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64), documents(53)
    expected = short_convolution(x, weight, number)
    for cut in (1, 2, 17, 33):
        first, before = short_convolution(x[:cut], weight, number[:cut])
        second, behind = short_convolution(x[cut:], weight, number[cut:] - number[cut - 1], before)
        torch.testing.assert_close((torch.cat((first, second)), behind), expected, **EXACT)


@pytest.mark.parametrize("packed", [False, True])
def test_bf16_rounds_nothing_but_the_reads_of_a_chunk(packed: bool) -> None:
    """With bf16 inputs, the states are as accurate as with fp32 inputs. The error of outputs is at most 2 u + u^2
    relative to the outputs, where u = 2^-8 is the unit roundoff of bf16. The relative error of each gradient is at most
    3 u."""
    length, unit = 150, 2.0**-8
    tokens = [x.detach().bfloat16() for x in operands(length)[:-1]]
    tokens[3] = tokens[3].float()  # the mixer also computes the log decay g in fp32
    number = documents(length) if packed else None
    own, wide = ([x.to(dtype or x.dtype).requires_grad_() for x in tokens] for dtype in (None, torch.float64))
    (out, state), (expected, exact) = gated_delta_chunks(*own, number), gated_delta_chunks(*wide, number)
    assert out.dtype == state.dtype == torch.float32
    torch.testing.assert_close(state.double(), exact, rtol=0.0, atol=2.0**-16 * exact.abs().max().item())
    error = (out - expected).norm() / expected.norm()
    assert 2.0**-12 < error < 2 * unit + unit**2, error
    grads = [torch.autograd.grad(weighted((y,)), x) for y, x in ((out, own), (expected, wide))]
    for name, grad, right in zip(("q", "k", "v", "g", "beta"), *grads, strict=True):
        assert (grad - right).norm() <= 3 * unit * right.norm(), name


def test_fp16_is_computed_in_fp32() -> None:
    rounded = [x.detach().half() for x in operands(20)[:-1]]
    out, state = gated_delta_chunks(*rounded)
    expected = gated_delta_chunks(*(x.float() for x in rounded))
    assert out.dtype == state.dtype == torch.float32
    torch.testing.assert_close((out, state), expected, rtol=1e-2, atol=1e-2)


PRODUCT = model_of("delta-product")


@pytest.mark.parametrize("starts", [(0,), (0, 3, 4, 11)])
def test_delta_product_matches_the_recurrence(starts: tuple[int, ...]) -> None:
    """The reference is the recurrence of arXiv 2502.10297. For each token, a state decays once and is then updated with
    three keys and values, one after the other."""
    net = next(m for m in GPTModel(PRODUCT, FP64).train().modules() if isinstance(m, gated_delta_net.GatedDeltaNet))
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(16, 1, 4, sum(net.channels), generator=generator, dtype=torch.float64, requires_grad=True)
    documents = None if len(starts) == 1 else (starts,)
    number = None if documents is None else gated_delta_net.documents_begun(documents, 16, mixed.device)
    found = net._mix(mixed, number, BatchContext(torch.zeros(1, dtype=torch.int64), documents=documents))
    rows = []
    for start, stop in pairwise((*starts, 16)):
        part = mixed[start:stop, 0]
        convolved = F.silu(short_convolution(part[:, None, :, :54], net.conv1d)[0][:, 0])
        for head in range(8):
            group, own = divmod(head, 2)
            queries, keys, values = convolved[:, group].split((6, 3 * 6, 3 * 2 * 5), dim=-1)
            gates, betas, decays = part[:, group, 54:].split((2 * 5, 3 * 2, 2), dim=-1)
            S, normed = mixed.new_zeros(6, 5), lambda x: x / (x.square().sum() + 1e-6).sqrt()
            for t in range(stop - start):
                S = S * torch.exp(-net.a_log[head].exp() * F.softplus(decays[t, own] + net.dt_bias[head]))
                for step in range(3):
                    k, v = normed(keys[t, 6 * step : 6 * step + 6]), values[t].view(3, 2, 5)[step, own]
                    S = S + betas[t].view(3, 2)[step, own].sigmoid() * torch.outer(k, v - S.T @ k)
                read = F.rms_norm(S.T @ normed(queries[t]) / 6**0.5, (5,), net.out_norm, net.eps)
                rows.append((start + t, head, read * F.silu(gates[t].view(2, 5)[own])))
    expected = torch.stack([row for _, _, row in sorted(rows, key=lambda each: each[:2])]).view(16, 1, 40)
    torch.testing.assert_close(found, expected, **EXACT)
    gradients = [torch.autograd.grad(weighted((out,)), [mixed, net.conv1d, net.a_log]) for out in (found, expected)]
    torch.testing.assert_close(*gradients, **EXACT)


def stub_of_fla(calls: list[dict[str, Any]]) -> ModuleType:
    """Return a replacement for flash-linear-attention's chunk_gated_delta_rule. The replacement asserts that operands
    are 16-bit tensors [b, s, heads, d] with equal numbers of query, key and value heads. For packed sequences, the
    replacement also asserts that the batch size is one."""

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert q.dtype == k.dtype == v.dtype == beta.dtype == torch.bfloat16 and g.dtype == torch.float32
        assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape == beta.shape
        assert scale is None and initial_state is None and not output_final_state and not use_qk_l2norm_in_kernel
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        calls.append({"shape": q.shape, "cu_seqlens": cu_seqlens})
        number = None
        if cu_seqlens is not None:
            assert len(q) == 1 and cu_seqlens.dtype == torch.int64 and cu_seqlens[-1] == q.shape[1]
            starts = torch.zeros(q.shape[1] + 1, 1, dtype=torch.int64)
            starts[cu_seqlens] = 1
            number = starts[:-1].cumsum(0)
        out, _ = gated_delta_steps(*(x.transpose(0, 1) for x in (q, k, v, g, beta)), number)
        return out.transpose(0, 1).to(q.dtype), None

    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_of_flash_linear_attention_match_torch(
    monkeypatch: pytest.MonkeyPatch, packed: bool, steps: int
) -> None:
    """A model whose linear attention calls flash-linear-attention's kernels has the same loss and gradients as a model
    without these kernels."""
    config = replace(DELTA_NET if steps == 1 else PRODUCT, recompute_granularity="selective" if packed else None)
    batch = random_batch(config, **(packed_documents(config) if packed else {})).local_to(ParallelState().cp)
    losses, gradients, calls = [], [], []
    for stub in (False, True):
        with monkeypatch.context() as patch:
            if stub:
                for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
                    patch.setitem(sys.modules, name, stub_of_fla(calls))
                patch.setattr(gated_delta_net, "flash_rule", lambda dtype, _: flash_rule(dtype, torch.device("cuda")))
            model = GPTModel(config, ModelParallelConfig(bf16=True)).train()
            loss = model(None, batch)
            loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[0].norm()
    shape = (1, 48 * steps, 8, 6) if packed else (3, 16 * steps, 8, 6)
    # In the packed case, which uses selective recomputation, the backward pass calls the kernel a second time.
    assert [call["shape"] for call in calls] == [shape] * (2 if packed else 1)
    if packed:
        starts = [16 * sample + start for sample, found in enumerate(batch.documents) for start in found]
        assert calls[0]["cu_seqlens"].tolist() == [steps * start for start in (*starts, 48)]


def test_kernels_run_only_on_gpus_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert flash_rule(torch.bfloat16, cuda) is None  # without flash-linear-attention, there is no kernel
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, stub_of_fla([]))
    assert flash_rule(torch.bfloat16, cuda) is not None
    assert flash_rule(torch.bfloat16, torch.device("cpu")) is flash_rule(torch.float32, cuda) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert flash_rule(torch.bfloat16, cuda) is None


def test_pattern_chooses_full_or_linear_attention() -> None:
    """As in Megatron-LM, a frequency N means N - 1 layers of linear attention followed by one layer of full attention.
    Linear attention has no rotary embedding."""
    config = replace(DELTA_NET, num_layers=8, linear_attention_freq="4", window_size=3)
    assert config.linear_pattern == (True, True, True, False) * 2
    assert [kind.linear for kind in config.layers] == ["gated_delta_net" if x else None for x in config.linear_pattern]
    assert [kind.rotation is None and kind.span.window is None for kind in config.layers] == [*config.linear_pattern]


@pytest.mark.parametrize("steps", [1, 2])
def test_flops_of_gated_delta_nets(steps: int) -> None:
    """The test counts the FLOPs of a chunk of 64 rows, divided by the number of rows. Products of [64, 64] by [64, d]
    and products with the state are counted three times: in the forward pass, and twice in the backward pass. The FLOPs
    of decay sums are counted twice. The FLOPs of the triangular solve's gradient are counted once. FLOPs of
    recomputation in the backward pass are not counted."""
    more = {"linear_num_householder": steps}
    config = with_fields(TransformerConfig(**shape(1, 32, 4, 64, 128, 128)), LLAMA | LINEAR | more)
    plain = TransformerConfig(**shape(1, 32, 4, 64, 128, 128), **LLAMA)
    chunk, keys, heads, dk, dv = 64, 4, 8, 6, 5
    products = 2 * keys * chunk * dk + heads * (2 * chunk * dv + chunk * dk + 3 * dk * dv)
    projected = keys * (1 + steps) * dk + heads * ((steps + 1) * dv + steps + 1)
    projections = 32 * projected + heads * dv * 32 - 4 * 32 * 32
    once = heads * (2 * chunk + chunk**2)
    found = model_flops(config).matmul - model_flops(plain).matmul
    assert found == 6 * (steps * products + projections) + 2 * steps * once
    assert model_flops(config).attention == 0


def delta_net(x: Tensor, compiled: bool) -> Tensor:
    mixed, number = x.unflatten(-1, (2, 20)), torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]).t()
    conv1d = torch.linspace(-1, 1, 2 * 16 * 3, dtype=x.dtype).view(2, 16, 3)
    weights, rows = DeltaWeights(conv1d, *mixed[0, 0, :, 0:4].unbind()), DeltaRows((4, 4))
    operands = region(gated_delta_net.delta_operands, compiled)(
        mixed[..., :16], mixed[..., 16:18].flatten(2), mixed[..., 18:].flatten(2), weights, rows, number, None
    )
    q, k, v, g, beta = operands[0]
    out = region(gated_norm, compiled)(v, v * 2, weights[1], 1e-5)
    return torch.cat([part.flatten(2) for part in (q, k, g, beta, out)], -1)


@compiles
def test_the_compiled_region_matches_the_plain_one() -> None:
    check_region(delta_net)
