"""An MLP with SwiGLU whose activation is cast to fp8 where it is computed, and its gradient too.

For `--compile` with scales that are known before (--fp8-recipe delayed): neither the activation nor the gradient of its
input is stored in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    enter,
    entered,
    observed,
)
from megatron.core.tensor_parallel.linear_gemms import (
    Operand,
    Operands,
    OutputGradient,
    attach,
    given_input,
    matrix_of,
    rows_of,
)
from megatron.core.tensor_parallel.weight_grad import accumulate_weight_grad, saved_without_graph
from megatron.core.transformer.activations import FusedActivation
from megatron.extensions.fp8.recipes import DelayedGemms, given_operands
from megatron.extensions.fusions.kernel_choice import FusedKernel
from megatron.extensions.fusions.kernels.swiglu_cast import swiglu_cast, swiglu_gradient_cast


def casts_swiglu(fc1: ParallelLinear, activation: object, fc2: ParallelLinear) -> bool:
    """Whether `cast_mlp` can take the place of fc2(activation(fc1(x)))."""
    swiglu = isinstance(activation, FusedActivation) and activation.compiled and activation.kind == "swiglu"
    plain = type(fc1) is ColumnParallelLinear and type(fc2) is RowParallelLinear and fc1.bias is fc2.bias is None
    delayed = swiglu and plain and all(isinstance(linear.gemms, DelayedGemms) for linear in (fc1, fc2))
    return delayed and torch.is_grad_enabled() and not observed(fc1, fc2)


def cast_mlp(x: Tensor, fc1: ParallelLinear, fc2: ParallelLinear, addend: Tensor | None = None) -> Tensor:
    """fc2(SwiGLU(fc1(x))): x [s, b, h] -> [s, b, h]; [s/tp, b, h] under sequence parallelism. With gradients. Added to
    an `addend` [s, b, h] where fc2 takes one.

    The layers themselves are not called: where they are `observed`, their hooks would see nothing."""
    of_output = fc2.output_gradient(None)
    return attach(_CastMLP.apply(x, fc1.weight, fc2.weight, fc1, fc2, of_output, addend), of_output)


MLP_KERNEL = FusedKernel(cast_mlp, cast_mlp, casts_swiglu, lambda shapes: (), 0.0)
"""Its parts are compared, `kernels/swiglu_cast.py`."""


class _CastMLP(torch.autograd.Function):
    """What two `LinearFunction`s and an activation between them do, with their collectives and weight gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        fc1: ParallelLinear,
        fc2: ParallelLinear,
        of_output: OutputGradient | None,
        addend: Tensor | None,
    ) -> Tensor:
        needs = ctx.needs_input_grad[1:3]
        local, saved = given_input(x) or fc1.gemms.cast_input(x, needs[0])
        hidden = fc1.gemms.forward(entered(enter(local, fc1.boundary, fc1.axis)), weight1, None)
        activated = _activated(_delayed(fc2), hidden, needs[1])
        ctx.saved = len(saved) if needs[0] else 0
        ctx.save_for_backward(hidden, *(saved if needs[0] else ()), *activated.weight_grad)
        # The parameters themselves: activation checkpointing returns saved tensors without their attributes.
        ctx.weights, ctx.layers, ctx.of_output = (weight1, weight2), (fc1, fc2), of_output
        return fc2.boundary.leave(fc2.gemms.forward(activated.output, weight2, None, addend), fc2.axis).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *operands = saved_without_graph(ctx)
        x, activated = tuple(operands[: ctx.saved]), tuple(operands[ctx.saved :])
        (weight1, weight2), (fc1, fc2) = ctx.weights, ctx.layers
        needs_dx, needs1, needs2 = ctx.needs_input_grad[:3]

        gathering = enter(x, fc1.boundary, fc1.axis) if needs1 and not fc1.queue.defers(weight1) else None
        given = None if ctx.of_output is None else ctx.of_output.take(grad_output)[0]
        dy = given or fc2.gemms.cast_grad(fc2.boundary.leave_adjoint(grad_output, fc2.axis).wait(), needs2)
        of_activated = fc2.gemms.input_grad(dy.output, weight2)
        dw2 = _add_weight_grad(fc2, weight2, dy.weight_grad, lambda: activated) if needs2 else None
        dh = _gradient(_delayed(fc1), hidden, of_activated, needs1)
        dx = fc1.boundary.enter_adjoint(fc1.gemms.input_grad(dh.output, weight1), fc1.axis) if needs_dx else None
        dw1 = None
        if needs1:
            whole = lambda: entered(enter(x, fc1.boundary, fc1.axis) if gathering is None else gathering)  # noqa: E731
            dw1 = _add_weight_grad(fc1, weight1, dh.weight_grad, whole)
        of_addend = grad_output if ctx.needs_input_grad[-1] else None
        return (None if dx is None else dx.wait()), dw1, dw2, None, None, None, of_addend


def _activated(gemms: DelayedGemms, x: Tensor, needs_dw: bool) -> Operands:
    """`cast_input` of SwiGLU(x), from one read of x [s, b, 2 in]."""
    pair = swiglu_cast(rows_of(x).detach(), *gemms.input_order(needs_dw), gemms.compiled)
    return given_operands(pair, x.shape[:-1])


def _gradient(gemms: DelayedGemms, x: Tensor, grad: Tensor, needs_dw: bool) -> Operands:
    """`cast_grad` of the gradient of x [s, b, out], the output of a layer, of which SwiGLU is taken. `grad`
    [s, b, out / 2] is that of SwiGLU(x)."""
    operands = rows_of(x).detach(), rows_of(grad).detach(), *gemms.grad_order(needs_dw), gemms.compiled
    return given_operands(swiglu_gradient_cast(*operands), x.shape[:-1])


def _delayed(linear: ParallelLinear) -> DelayedGemms:
    assert isinstance(linear.gemms, DelayedGemms)
    return linear.gemms


def _add_weight_grad(linear: ParallelLinear, weight: Tensor, dy: Operand, x: Callable[[], Operand]) -> Tensor | None:
    """dW = dYᵀ X, now or later, of the operand that x() returns."""

    def add_(out: Tensor, overwrite: bool = False) -> None:
        linear.gemms.add_weight_grad_(matrix_of(out), dy, x(), overwrite)

    return accumulate_weight_grad(weight, add_, linear.queue, partial(add_, overwrite=True))
