"""Attention by tiles on a GPU, with its flash kernel, against the same in fp64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from megatron.core.attention.flash_kernels import FlashCUDAKernel, flash_kernel
from megatron.core.attention.local_attention import local_attention
from megatron.core.attention.partition import rank_spans
from megatron.core.attention.tile_kernels import Causal, TorchKernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTH = 192
PACKED = ((0, 1, 30, 101), (0, 97))


@pytest.mark.parametrize("documents", [None, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("groups", [1, 4])
def test_flash_kernel(groups: int, window: int | None, documents: tuple[tuple[int, ...], ...] | None) -> None:
    kernel = flash_kernel(0.125, torch.bfloat16, torch.device("cuda", 0), 64)
    assert isinstance(kernel, FlashCUDAKernel), "this GPU is too old for flash attention"
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(LENGTH, 2, n, 64, generator=generator).bfloat16() for n in (4, groups, groups, 4))
    for spans in (None, rank_spans(LENGTH, 0, 2), rank_spans(LENGTH, 1, 2)):
        rows = list(range(LENGTH)) if spans is None else [place for span in spans for place in span]
        exact = [x.double().requires_grad_() for x in (q[rows], k, v)]
        fast = [x.cuda().requires_grad_() for x in (q[rows], k, v)]
        expected = local_attention(*exact, Causal(TorchKernel(0.125), documents, window), spans)
        out = local_attention(*fast, Causal(kernel, documents, window), spans)
        pairs = [(out, expected)]
        pairs += zip(
            torch.autograd.grad(out, fast, grad[rows].cuda()),
            torch.autograd.grad(expected, exact, grad[rows].double()),
            strict=True,
        )
        for one, other in pairs:
            assert ((one.double().cpu() - other).norm() / other.norm()).item() < 0.02
