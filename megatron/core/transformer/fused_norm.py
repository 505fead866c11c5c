"""RMSNorm and LayerNorm together with the residual stream: x + update and its norm in one kernel, and in the backward
the gradient of both, with those of weight and bias, in one pass over the operands.

For `--compile`. torch's own norms are kernels of their own: beside them a residual addition reads and writes the stream
once more forward and backward, and the weight's gradient reads both operands again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region
from megatron.core.dropout import DropoutMask


def fused_norm(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
    one_plus: bool,
    mask: DropoutMask | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + update, its norm over the last dim): x, update [..., h], weight, bias [h] -> [..., h] twice, in fp32 for
    16-bit operands. Without an update (x, its norm): use that x in place of the given one, so that its gradient is
    added within the backward of the norm.

    With a `mask` that is x + dropout of the update, for x [s, b, h].

    `centered` is LayerNorm (arXiv:1607.06450), else RMSNorm (arXiv:1910.07467). `one_plus` adds 1 to the weight.
    """
    return _FusedNorm.apply(x, update, weight, bias, mask, eps, centered, one_plus)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        update: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        mask: DropoutMask | None,
        eps: float,
        centered: bool,
        one_plus: bool,
    ) -> tuple[Tensor, Tensor]:
        settings = weight, bias, eps, centered, one_plus
        if update is None:
            total, (normed, *statistics) = x, region(_normalized, True, static=True)(x, *settings)
        else:
            total, normed, *statistics = region(_added_and_normalized, True, static=True)(x, update, mask, *settings)
        bits = () if mask is None else mask[1:]
        ctx.save_for_backward(total, weight, *bits, *statistics)
        ctx.p, ctx.has_bias, ctx.one_plus = None if mask is None else mask.p, bias is not None, one_plus
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor | None, of_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, *kept = ctx.saved_tensors
        mask = None if ctx.p is None else DropoutMask(ctx.p, *kept[:2])
        statistics = tuple(kept if mask is None else kept[2:])
        if of_normed is None:
            of_normed = torch.zeros_like(total)
        backward = region(_backward_of_both, True, static=True)
        dx, of_update, of_weight, *of_bias = backward(
            mask, total, of_total, of_normed, weight, statistics, ctx.one_plus
        )
        of_update = dx if of_update is None else of_update
        return dx, of_update if ctx.needs_input_grad[1] else None, of_weight, *(of_bias or [None]), *[None] * 4


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.itemsize == 2 else x


def _scale(weight: Tensor, one_plus: bool) -> Tensor:
    return _wide(weight) + 1 if one_plus else _wide(weight)


def _added_and_normalized(
    x: Tensor,
    update: Tensor,
    mask: DropoutMask | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
) -> tuple[Tensor, ...]:
    """(x + update, and of it what `_normalized` returns)"""
    total = x + (update if mask is None else mask.applied(update))
    return total, *_normalized(total, weight, bias, eps, centered, one_plus)


def _normalized(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, one_plus: bool
) -> tuple[Tensor, ...]:
    """(norm of each row, 1 / its standard deviation or root mean square, and of LayerNorm its mean)"""
    wide = _wide(x)
    mean = wide.mean(-1, keepdim=True) if centered else None
    wide = wide if mean is None else wide - mean
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * inverse * _scale(weight, one_plus)
    normed = normed if bias is None else normed + _wide(bias)
    return (normed.to(x.dtype), inverse) if mean is None else (normed.to(x.dtype), inverse, mean)


def _backward_of_both(mask: DropoutMask | None, *args: Any) -> tuple[Tensor | None, ...]:
    """`_backward`, with the gradient of the update after that of x where dropout makes them differ, else None."""
    dx, *of_parameters = _backward(*args)
    return dx, None if mask is None else mask.applied(dx), *of_parameters


def _backward(
    x: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, ...],
    one_plus: bool,
) -> tuple[Tensor, ...]:
    """Gradients of x, with that of the residual stream, of the weight, and for LayerNorm of the bias.

    With z the normalized row and g its gradient: dx = (g - z mean(g z) - mean(g)) / deviation; RMSNorm has no mean(g).
    """
    inverse, *means = statistics
    dy, wide = _wide(of_normed), _wide(x)
    z = (wide - means[0] if means else wide) * inverse
    g = dy * _scale(weight, one_plus)
    dx = g - z * (g * z).mean(-1, keepdim=True)
    dx = (dx - g.mean(-1, keepdim=True) if means else dx) * inverse
    dx = dx if of_total is None else dx + of_total
    rows = tuple(range(x.ndim - 1))
    of_weight = (dy * z).sum(rows).to(weight.dtype)
    return (dx.to(x.dtype), of_weight, dy.sum(rows).to(weight.dtype)) if means else (dx.to(x.dtype), of_weight)
