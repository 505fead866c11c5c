"""Kernels of keys and values of one width, where values have another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.tile_kernels import Causal, TorchKernel
from megatron.core.attention.varlen import packed_attention
from megatron.extensions.fusions.attention.flash_kernels import EqualWidthsKernel, FlashCPUKernel
from tests.pure.test_packed_attention import Twin


def operands(width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((12, 2, 4, width), (12, 2, 2, width), (12, 2, 2, value_width))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)  # type: ignore[return-value]


def gradients(out: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), qkv)


@pytest.mark.parametrize("widths", [(10, 6), (6, 10)])
@pytest.mark.parametrize("window", [None, 5])
def test_kernels_of_one_width(widths: tuple[int, int], window: int | None) -> None:
    """A kernel that needs equal widths gives the output and the gradients of one that does not."""
    qkv, documents = operands(*widths), ((0, 5), (0, 7, 9))
    expected = local_attention(*qkv, Causal(TorchKernel(0.3), documents, window))
    assert expected.shape == (12, 2, 4, widths[1])
    found = local_attention(*qkv, Causal(FlashCPUKernel(0.3), documents, window))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(found, qkv), gradients(expected, qkv), rtol=1e-11, atol=1e-12)


def test_packed_kernels_of_one_width() -> None:
    qkv = tuple(x[:, :1].detach().requires_grad_() for x in operands(10, 6))
    expected = local_attention(*qkv, Causal(TorchKernel(0.3)))
    found = packed_attention(*qkv, None, None, EqualWidthsKernel(Twin(0.3)))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, qkv), gradients(expected, qkv))
