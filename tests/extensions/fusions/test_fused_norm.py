"""The fused norm computes what a sum and torch's norm do, forward and backward, compiled."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.dropout import dropout
from megatron.extensions.fusions.fused_norm import DropoutMask, add_update, fused_norm
from megatron.extensions.fusions.kernels.norms import Norm

SAMPLES = torch.tensor([3, 8])


def of_dropout(x: Tensor, compiled: bool) -> Tensor:
    """x + dropout of a half of it, and the norm of that."""
    x, update, weight = *x.chunk(2, -1), x[0, 0, :20].sin()
    arguments = 0.3, 1234567, SAMPLES, 7
    if compiled:
        mask = DropoutMask.of(update, *arguments)
        total, z = fused_norm(x, update, Norm(weight, None, 1e-3, False, False), mask)
    else:
        total = x + dropout(update, *arguments)
        z = F.rms_norm(total, (20,), weight, 1e-3)
    return torch.cat((total.sin(), z), -1)


def sum_with_dropout(x: Tensor, compiled: bool) -> Tensor:
    """x + dropout of a half of it."""
    x, update = x.chunk(2, -1)
    arguments = 0.3, 1234567, SAMPLES, 7
    if not compiled:
        return (x + dropout(update, *arguments)).sin()
    return add_update(x, update, DropoutMask.of(update, *arguments)).sin()


def with_norm(x: Tensor, compiled: bool, centered: bool, added: bool = True) -> Tensor:
    """Sum and norm of the two halves of x, each multiplied, so that their gradients differ. `compiled` with a norm of
    1 + weight as well, which must be that of the weight below 1."""
    x, update, weight, bias = *x.chunk(2, -1), x[0, 0, :20].sin(), x[0, 1, :20].cos()
    if compiled:
        (total, normed), (_, same) = (
            fused_norm(x, update if added else None, Norm(w, bias if centered else None, 1e-3, centered, one))
            for w, one in ((weight, False), (weight - 1, True))
        )
        normed = (normed + same) / 2
    else:
        total = x + update if added else x
        normed = F.layer_norm(total, (20,), weight, bias, 1e-3) if centered else F.rms_norm(total, (20,), weight, 1e-3)
    return torch.cat((total.sin() if added else total * 3, normed), -1)


NORMS = {
    "norm": partial(with_norm, centered=False),
    "centered norm": partial(with_norm, centered=True),
    "norm alone": partial(with_norm, centered=False, added=False),
    "centered norm alone": partial(with_norm, centered=True, added=False),
    "norm of dropout": of_dropout,
    "sum with dropout": sum_with_dropout,
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.grid("name", ("centered norm", "norm of dropout"), list(NORMS))
def test_a_fused_norm_is_a_sum_and_a_norm(name: str) -> None:
    x = torch.randn(5, 2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = []
    for compiled in (True, False):
        y = NORMS[name](x, compiled)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        found.append((y.detach(), *torch.autograd.grad(y, x, weights)))
    for mine, plain in zip(*found, strict=True):
        assert mine.dtype == plain.dtype and plain.abs().sum() > 0
        torch.testing.assert_close(mine, plain, rtol=1e-13, atol=1e-14)
