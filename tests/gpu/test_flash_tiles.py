"""Tests that compare tiled attention by GPU kernels with fp64 attention on the CPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from megatron.core.attention.backends import ATTENTION_BACKENDS, AttentionOperands
from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.core_attention import FusedAttention
from megatron.core.attention.tile_kernels import Causal, Dropout, Kernel, TorchKernel
from megatron.core.attention.tiles import rank_spans
from megatron.core.dropout import attention_dropout
from megatron.extensions.speed.fp8.casts import FIRST_CAPABILITY
from megatron.extensions.speed.fusions.attention.backends import MODULE, CudnnKernel, Flash3Attention
from megatron.extensions.speed.fusions.attention.flash_dropout import FlashDropoutKernel
from megatron.extensions.speed.fusions.attention.flash_kernels import FlashCUDAKernel
from megatron.extensions.speed.fusions.attention.fp8_attention import KERNEL_ERROR, Fp8Attention, error_beside_twin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTH = 192
PACKED = ((0, 1, 30, 101), (0, 97))


needs_flash3 = pytest.mark.skipif(importlib.util.find_spec(MODULE) is None, reason=f"needs the package of {MODULE}")


@pytest.mark.parametrize("documents", [None, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("backend", ["flash", pytest.param("flash3", marks=needs_flash3)])
def test_flash_kernels_match_fp64_attention(
    backend: str, groups: int, window: int | None, documents: tuple[tuple[int, ...], ...] | None
) -> None:
    operands = AttentionOperands(0.125, torch.bfloat16, torch.device("cuda", 0), 64, 64)
    _, kernel = ATTENTION_BACKENDS.build(backend, operands).tiles()
    assert isinstance(kernel, FlashCUDAKernel), "this GPU is too old for flash attention"
    compare(kernel, groups, window, documents)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_cudnn_kernel_matches_fp64_attention(groups: int) -> None:
    compare(CudnnKernel(0.125), groups, None, None)


MASKS = Dropout(0.2, 2**60 + 7, 3, torch.tensor([5, 2**35]))


@pytest.mark.parametrize("documents", [None, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("groups", "width"), [(1, 64), (4, 128), (2, 256), (2, 80)])
def test_the_dropout_kernel_matches_its_definition(
    groups: int, width: int, window: int | None, documents: tuple[tuple[int, ...], ...] | None
) -> None:
    kernel = FlashDropoutKernel(0.125, replace(MASKS, sample_index=MASKS.sample_index.cuda()))
    compare(kernel, groups, window, documents, TorchKernel(0.125, MASKS), width)


def test_masks_of_the_dropout_kernel_match_plain_torch() -> None:
    """The dropout masks are bit-identical. All scores are equal, and each value vector identifies its key. An output is
    therefore zero exactly where the weight of the corresponding key is dropped."""
    n, heads, width = 512, 4, 128
    q = torch.zeros(n, 2, heads, width, device="cuda", dtype=torch.bfloat16)
    masks = replace(MASKS, sample_index=MASKS.sample_index.cuda())
    kept = attention_dropout(torch.ones(2, heads, n, n, device="cuda"), masks.p, masks.key, masks.sample_index, 3)
    for first in range(0, n, width):
        v = torch.zeros_like(q)
        v[first : first + width] = torch.eye(width, device="cuda", dtype=v.dtype)[:, None, None]
        out = local_attention(q, q, v, Causal(FlashDropoutKernel(1.0, masks)))
        assert torch.equal(out != 0, kept.tril()[..., first : first + width].permute(2, 0, 1, 3) != 0)


def test_gradients_of_the_dropout_kernel_are_reproducible() -> None:
    kernel = FlashDropoutKernel(0.125, replace(MASKS, sample_index=MASKS.sample_index.cuda()))
    q, k, v = (torch.randn(512, 2, n, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (8, 2, 2))
    grad = torch.randn_like(q)
    runs = [torch.autograd.grad(local_attention(q, k, v, Causal(kernel)), (q, k, v), grad) for _ in range(3)]
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0], strict=True))


@needs_flash3
def test_flash3_computes_whole_samples() -> None:
    q, k, v = (torch.randn(LENGTH, 2, n, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (4, 2, 2))
    one, other = (attention(0.125)(q, k, v) for attention in (Flash3Attention, FusedAttention))
    grad = torch.randn_like(other)
    pairs = [(one, other), *zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (one, other)), strict=True)]
    for found, expected in pairs:
        assert ((found - expected).norm() / expected.norm()).item() < 0.02


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", ["fp8_triton", pytest.param("fp8_flash3", marks=needs_flash3)])
def test_fp8_kernels_match_fp64_attention(name: str, width: int) -> None:
    if torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        pytest.skip("this GPU does not multiply in fp8")
    operands = AttentionOperands(0.125, torch.bfloat16, torch.device("cuda", 0), width, width)
    attention = ATTENTION_BACKENDS.build(name, operands).causal()
    assert isinstance(attention, Fp8Attention)
    q, k, v = (torch.randn(LENGTH, 2, n, width, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    assert error_beside_twin(attention.kernels, (q, k, v), 0.125) < KERNEL_ERROR


def compare(
    kernel: Kernel,
    groups: int,
    window: int | None,
    documents: tuple[tuple[int, ...], ...] | None,
    twin: TorchKernel | None = None,
    width: int = 64,
) -> None:
    twin, generator = twin or TorchKernel(0.125), torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(LENGTH, 2, n, width, generator=generator).bfloat16() for n in (4, groups, groups, 4))
    for spans in (None, rank_spans(LENGTH, 0, 2), rank_spans(LENGTH, 1, 2)):
        rows = list(range(LENGTH)) if spans is None else [place for span in spans for place in span]
        exact = [x.double().requires_grad_() for x in (q[rows], k, v)]
        fast = [x.cuda().requires_grad_() for x in (q[rows], k, v)]
        expected = local_attention(*exact, Causal(twin, documents, window), spans)
        out = local_attention(*fast, Causal(kernel, documents, window), spans)
        pairs = [(out, expected)]
        pairs += zip(
            torch.autograd.grad(out, fast, grad[rows].cuda()),
            torch.autograd.grad(expected, exact, grad[rows].double()),
            strict=True,
        )
        for one, other in pairs:
            assert ((one.double().cpu() - other).norm() / other.norm()).item() < 0.02
