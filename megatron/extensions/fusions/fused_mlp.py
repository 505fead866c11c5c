"""An MLP with SwiGLU whose activation is cast to fp8 where it is computed, and its gradient too.

For `--compile` with scales that are known before (--fp8-recipe delayed): neither the activation nor the gradient of its
input is stored in 16 bits. Stand-ins carry the casts to the linear layers before and behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearFunction,
    ParallelLinear,
    RowParallelLinear,
    observed,
)
from megatron.core.tensor_parallel.linear_gemms import OutputGradient, rows_of
from megatron.core.tensor_parallel.weight_grad import saved_without_graph
from megatron.core.transformer.activations import FusedActivation
from megatron.extensions.fp8.recipes import DelayedGemms
from megatron.extensions.fusions.fused_norm import InputCast
from megatron.extensions.fusions.kernel_choice import FusedKernel
from megatron.extensions.fusions.kernels.casts import swiglu_cast, swiglu_gradient_cast


def casts_swiglu(fc1: ParallelLinear, activation: object, fc2: ParallelLinear) -> bool:
    """Whether `cast_mlp` can replace fc2(activation(fc1(x)))."""
    swiglu = isinstance(activation, FusedActivation) and activation.compiled and activation.kind == "swiglu"
    plain = type(fc1) is ColumnParallelLinear and type(fc2) is RowParallelLinear and fc1.bias is fc2.bias is None
    delayed = swiglu and plain and all(isinstance(linear.gemms, DelayedGemms) for linear in (fc1, fc2))
    return delayed and torch.is_grad_enabled() and not observed(fc1, fc2)


def cast_mlp(x: Tensor, fc1: ParallelLinear, fc2: ParallelLinear, addend: Tensor | None = None) -> Tensor:
    """fc2(SwiGLU(fc1(x))): x [s, b, h] -> [s, b, h]; [s/tp, b, h] under sequence parallelism. With gradients. Added to
    an `addend` [s, b, h] where fc2 takes one.

    If the layers are `observed`, their hooks would see stand-ins."""
    assert isinstance(fc2.gemms, DelayedGemms)
    of_hidden = OutputGradient(fc1.gemms, fc1.weight.requires_grad, False)
    settings = fc1.boundary, fc1.axis, fc1.queue, fc1.gemms, True, of_hidden, None
    hidden = LinearFunction.apply(x, fc1.weight, None, *settings)
    activated = _CastSwiGLU.apply(hidden, InputCast(fc2.gemms, fc2.weight.requires_grad), of_hidden)
    y: Tensor = fc2(activated, addend=addend)
    return y


MLP_KERNEL = FusedKernel(cast_mlp, cast_mlp, casts_swiglu, lambda shapes: (), 0.0)
"""Its parts are compared, `kernels/casts.py`."""


class _CastSwiGLU(torch.autograd.Function):
    """SwiGLU of the output [s, b, 2f] of a layer, cast [s, b, f] as the layer behind it wants its input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, cast: InputCast, of_hidden: OutputGradient) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.of_hidden, ctx.compiled = of_hidden, cast.gemms.compiled
        pair = swiglu_cast(rows_of(hidden).detach(), cast.order(), ctx.compiled)
        return cast.stand_in(pair, (*hidden.shape[:-1], hidden.shape[-1] // 2), hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = saved_without_graph(ctx)
        operands = rows_of(hidden).detach(), rows_of(grad).detach()
        pair = swiglu_gradient_cast(*operands, ctx.of_hidden.order(), ctx.compiled)
        return ctx.of_hidden.put_stand_in(pair, hidden.shape, hidden.dtype), None, None
