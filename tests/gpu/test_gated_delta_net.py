"""Tests of the gated delta rule on a GPU. The chunked form in torch is compared with the recurrence in fp64.
flash-linear-attention's kernels, if installed, are also compared with the recurrence."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.extensions.mixers.linear_attention.gated_delta_rule import (
    flash_rule,
    gated_delta_chunks,
    gated_delta_steps,
)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")

DOCUMENTS = ((0, 3, 70, 130), (0, 64))


def operands() -> list[Tensor]:
    """Return q, k, v, g and beta in fp64 for 200 tokens, 2 samples, 4 heads and 2 key heads."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(200, 2, 2, 64), dim=-1) for _ in range(2))
    return [q, k, normal(200, 2, 4, 64), -normal(200, 2, 4).exp() / 4, normal(200, 2, 4).sigmoid()]


def number() -> Tensor:
    starts = torch.zeros(200, 2, dtype=torch.int64)
    for sample, places in enumerate(DOCUMENTS):
        starts[list(places[1:]), sample] = 1
    return starts.cumsum(0)


def results(rule: str, packed: bool, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return the output and all operand gradients as fp64 CPU tensors."""
    q, k, v, g, beta = (x.to(device, dtype).requires_grad_() for x in operands())
    tokens = (q, k, v, g if dtype == torch.float64 else g.float(), beta)
    counts = number().to(device) if packed else None
    if rule == "kernel":
        kernel = flash_rule(dtype, torch.device(device))
        assert kernel is not None
        out = kernel(*tokens, DOCUMENTS if packed else None)
    else:
        out, _ = (gated_delta_chunks if rule == "chunks" else gated_delta_steps)(*tokens, counts)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=device).view_as(out)
    found = (out, *torch.autograd.grad((out * weights).sum(), (q, k, v, g, beta)))
    return [x.detach().double().cpu() for x in found]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("rule", "dtype", "tolerance"),
    [
        ("chunks", torch.float64, 1e-10),
        ("chunks", torch.float32, 1e-4),
        ("chunks", torch.bfloat16, 0.03),
        ("kernel", torch.bfloat16, 0.03),
    ],
)
def test_kernels_match_the_recurrence(rule: str, dtype: torch.dtype, tolerance: float, packed: bool) -> None:
    if rule == "kernel" and importlib.util.find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed")
    found, expected = results(rule, packed, dtype, "cuda"), results("steps", packed, torch.float64, "cpu")
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() < tolerance * y.norm()
