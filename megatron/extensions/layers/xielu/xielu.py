"""xIELU activation function."""

from __future__ import annotations

from math import expm1, log

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.torch_private import AutogradContext

BETA = 0.5
"""Slope b of xIELU at zero."""


class XIELU(nn.Module):
    """Activation function xIELU with two trainable scalars, alpha_p and alpha_n (arXiv:2411.13010, section 3). The
    function is a_p x^2 + b x for x > 0, and a_n (e^x - 1 - x) + b x otherwise, where a_p = softplus(alpha_p), a_n = b +
    softplus(alpha_n) and b = 0.5."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()

        def scalar(key: str, value: float) -> nn.Parameter:
            # The channels are sharded over tensor-parallel ranks, so each rank computes only a partial sum of the
            # scalar's gradient.
            init = Init("constant", value=value)
            return make_parameter(ParamMeta(f"{name}.{key}", (1,), {}, init, ("tp",), role="vector"), ctx)

        # The initial value of both a_p and a_n is 0.8.
        self.alpha_p = scalar("alpha_p", log(expm1(0.8)))
        self.alpha_n = scalar("alpha_n", log(expm1(0.8 - BETA)))
        self.compiled = ctx.compiled

    def forward(self, x: Tensor) -> Tensor:
        return _XIELUFunction.apply(x, self.alpha_p, self.alpha_n, self.compiled)


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    negative = x.clamp(max=0)
    curved = F.softplus(alpha_p) * x.clamp(min=0).square()
    return curved + (BETA + F.softplus(alpha_n)) * (torch.expm1(negative) - negative) + BETA * x


def _xielu_gradients(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positive, negative = x.clamp(min=0), x.clamp(max=0)
    slope, wide = torch.expm1(negative), torch.promote_types(x.dtype, torch.float32)
    dx = grad * (2 * F.softplus(alpha_p) * positive + (BETA + F.softplus(alpha_n)) * slope + BETA)
    of_p = (grad * positive.square()).sum(dtype=wide) * alpha_p.to(wide).sigmoid()
    of_n = (grad * (slope - negative)).sum(dtype=wide) * alpha_n.to(wide).sigmoid()
    return dx, of_p.to(alpha_p.dtype), of_n.to(alpha_n.dtype)


class _XIELUContext(AutogradContext):
    compiled: bool


class _XIELUFunction(torch.autograd.Function):
    """Autograd function for xIELU. Only the input and the two scalars are saved for the backward pass."""

    @staticmethod
    def forward(ctx: _XIELUContext, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(x, alpha_p, alpha_n)
        ctx.compiled = compiled
        return region(_xielu, compiled)(x, alpha_p, alpha_n)

    @staticmethod
    @once_differentiable
    def backward(ctx: _XIELUContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, alpha_p, alpha_n = ctx.saved_tensors
        return *region(_xielu_gradients, ctx.compiled)(x, alpha_p, alpha_n, grad), None
