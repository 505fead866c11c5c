"""Batched matrix products with operands rounded to 16 bits and sums in fp32. Gradients are also computed with rounded
operands and fp32 sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import torch_function
from megatron.core.torch_private import AutogradContext


@torch_function
def bmm_in_fp32(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply 16-bit matrices a [n, i, k] and b [n, k, j], and sum in fp32. The result [n, i, j] is in `dtype`, which
    must be fp32 or the dtype of the operands.

    A product of two 16-bit numbers is exact in fp32, so only the sum and the conversion to `dtype` are rounded.
    """
    if not a.is_cuda:
        return (a.float() @ b.float()).to(dtype)
    return torch.bmm(a, b) if dtype == a.dtype else torch.bmm(a, b, out_dtype=dtype)


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """Multiply matrices a [..., i, k] and b [..., k, j] whose leading dimensions are equal. The result [..., i, j] is
    in `out_dtype`.

    Both operands are first rounded to `dtype`. If `dtype` has 16 bits, sums are in fp32, and `out_dtype` must be fp32
    or `dtype`. Otherwise, `out_dtype` must be `dtype`. Let u be the unit roundoff of `dtype` (2^-8 in bf16). Rounding
    an operand changes each element of the result by up to u |a| |b|. Rounding the result adds a relative error of up to
    u. The gradients are computed from the rounded operands and the rounded output gradient, and have the dtypes of the
    operands.
    """
    out: Tensor = _Multiply.apply(a, b, dtype, out_dtype)
    return out


class _MultiplyContext(AutogradContext):
    dtypes: tuple[torch.dtype, torch.dtype]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _MultiplyContext, a: Tensor, b: Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
        ctx.dtypes = a.dtype, b.dtype
        a, b = a.to(dtype), b.to(dtype)
        ctx.save_for_backward(a, b)
        return product(a, b, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _MultiplyContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad = grad.to(a.dtype).contiguous()
        of_a, of_b = ctx.needs_input_grad[:2]
        da = product(grad, b.mT, ctx.dtypes[0]) if of_a else None
        db = product(a.mT, grad, ctx.dtypes[1]) if of_b else None
        return da, db, None, None


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply matrices a [..., i, k] and b [..., k, j] whose dtypes and leading dimensions are equal. The result [...,
    i, j] is in `dtype`. `multiply` calls this function in its forward pass."""
    if a.itemsize > 2:
        return a @ b
    found: Tensor = bmm_in_fp32(a.flatten(0, -3), b.flatten(0, -3), dtype)
    return found.unflatten(0, a.shape[:-2])
