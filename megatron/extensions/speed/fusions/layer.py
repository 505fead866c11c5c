"""Transformer layer that fuses residual additions into adjacent norms or GEMMs, and SwiGLU MLP that computes the
activation and its input gradient directly in fp8.

The fused MLP requires `--compile` and --fp8-recipe delayed, whose scales are known before the activation is computed.
The activation and the gradient of its input are stored only in fp8. The linear layers before and after the activation
receive placeholder tensors, which have no values of their own but carry the casts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.batch import BatchContext
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearFunction,
    ParallelLinear,
    RowParallelLinear,
    observed,
)
from megatron.core.tensor_parallel.linear_gemms import OutputGradient, rows_of
from megatron.core.tensor_parallel.weight_grad import saved_without_graph
from megatron.core.torch_private import AutogradContext, forward_hooks, is_hooked
from megatron.core.transformer.activations import FusedActivation
from megatron.core.transformer.block import Stream, added
from megatron.core.transformer.layer import HiddenDropout, TransformerLayer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.recompute import with_recomputed
from megatron.core.transformer.self_attention import SelfAttention
from megatron.extensions.speed.fp8.recipes import DelayedGemms
from megatron.extensions.speed.fusions.fused_norm import (
    DropoutMask,
    FusedLayerNorm,
    InputCast,
    ResidualSum,
    add_and_norm,
)
from megatron.extensions.speed.fusions.kernel_choice import RunShapes
from megatron.extensions.speed.fusions.kernels.casts import swiglu_cast, swiglu_gradient_cast
from megatron.extensions.speed.fusions.split_heads import SplitSelfAttention


def casts_swiglu(fc1: ParallelLinear, activation: object, fc2: ParallelLinear) -> bool:
    """Return True if `cast_mlp` can replace fc2(activation(fc1(x)))."""
    swiglu = isinstance(activation, FusedActivation) and activation.compiled and activation.kind == "swiglu"
    plain = type(fc1) is ColumnParallelLinear and type(fc2) is RowParallelLinear and fc1.bias is fc2.bias is None
    delayed = swiglu and plain and all(isinstance(linear.gemms, DelayedGemms) for linear in (fc1, fc2))
    return delayed and torch.is_grad_enabled() and not observed(fc1, fc2)


def cast_mlp(x: Tensor, fc1: ParallelLinear, fc2: ParallelLinear, addend: Tensor | None = None) -> Tensor:
    """Compute fc2(SwiGLU(fc1(x))) as a differentiable function: x [s, b, h] -> [s, b, h]. Under sequence parallelism,
    both have the shape [s/tp, b, h]. Do not call this function if hooks are registered on the layers, because the hooks
    would receive placeholders instead of values.

    Args:
        x: Input.
        fc1: First layer.
        fc2: Second layer.
        addend: Tensor [s, b, h] to which the result is added, if fc2 supports an addend.
    """
    assert isinstance(fc2.gemms, DelayedGemms)
    of_hidden = OutputGradient(fc1.gemms, fc1.weight.requires_grad, False)
    settings = fc1.boundary, fc1.axis, fc1.queue, fc1.gemms, True, of_hidden, None
    hidden = LinearFunction.apply(x, fc1.weight, None, *settings)
    activated = _CastSwiGLU.apply(hidden, InputCast(fc2.gemms, fc2.weight.requires_grad), of_hidden)
    y: Tensor = fc2(activated, addend=addend)
    return y


class MLPKernel:
    """Kernel registry entry for `cast_mlp`. The kernels that `cast_mlp` calls are compared with torch separately
    (`kernels/casts.py`)."""

    suits = staticmethod(casts_swiglu)
    __call__ = staticmethod(cast_mlp)

    def samples(self, shapes: RunShapes) -> tuple[()]:
        return ()


MLP_KERNEL = MLPKernel()


class _CastSwiGLUContext(AutogradContext):
    of_hidden: OutputGradient
    compiled: bool


class _CastSwiGLU(torch.autograd.Function):
    """SwiGLU of a layer's output [s, b, 2f]. The result [s, b, f] is cast to fp8 for the next linear layer."""

    @staticmethod
    def forward(ctx: _CastSwiGLUContext, hidden: Tensor, cast: InputCast, of_hidden: OutputGradient) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.of_hidden, ctx.compiled = of_hidden, cast.gemms.compiled
        pair = swiglu_cast(rows_of(hidden).detach(), cast.order(), ctx.compiled)
        return cast.stand_in(pair, (*hidden.shape[:-1], hidden.shape[-1] // 2), hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CastSwiGLUContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = saved_without_graph(ctx)
        operands = rows_of(hidden).detach(), rows_of(grad).detach()
        pair = swiglu_gradient_cast(*operands, ctx.of_hidden.order(), ctx.compiled)
        return ctx.of_hidden.put_stand_in(pair, hidden.shape, hidden.dtype), None, None


class FusedTransformerLayer(TransformerLayer):
    """`TransformerLayer` that passes the residual stream to the next layer as a `ResidualSum`. The kernel of the next
    norm then also computes the residual addition.

    A norm casts its output to fp8 if the sublayer that follows can read this cast. If a sublayer supports an addend,
    the last GEMM of the sublayer computes the addition.
    """

    def forward(self, x: Stream, context: BatchContext, pending: bool = False) -> Stream:  # type: ignore[override]
        """Compute the layer: x [s, b, h] -> [s, b, h]. Under sequence parallelism, both have the shape [s/tp, b, h]. If
        `pending` is True, the result may be a `ResidualSum`, in which the output of the last sublayer is not yet added
        to the residual stream. The next module then performs this addition."""
        if self.norms_sums:
            return super().forward(added(x), context)
        stream = self._next(x if isinstance(x, ResidualSum) else ResidualSum(added(x)), context)
        return stream if pending else stream.added()

    def takes_pending(self) -> bool:
        """Return True if this layer accepts a `ResidualSum` and adds its pending update in a norm kernel. Forward hooks
        usually receive the residual stream after this addition. A hook with the attribute `takes_pending` also accepts
        a stream whose last update has not been added."""
        norm = self.input_layernorm if self.mixes else self.pre_mlp_layernorm
        observed = is_hooked(self, forward=False) or not all(
            getattr(hook, "takes_pending", False) for hook in forward_hooks(self)
        )
        return isinstance(norm, FusedLayerNorm) and norm.fuses() and not observed

    def _next(self, stream: ResidualSum, context: BatchContext) -> ResidualSum:
        if self.shares_norm:
            x, normed = add_and_norm(self.input_layernorm, stream, None)
            return ResidualSum(x, self._of_normed(self.input_layernorm, x, normed, self._side_by_side, context))
        if self.mixes:
            x, normed = add_and_norm(self.input_layernorm, stream, self._cast_of(self.self_attention))
            stream = self._add_attention(x, normed, context)
        if not self.has_mlp:
            return stream
        cast = self._cast_of(self.mlp)
        if self.parallel:
            x, normed = add_and_norm(self.pre_mlp_layernorm, ResidualSum(x), cast)
            _, update, mask = self._add_mlp(x, normed, context)
            return ResidualSum(stream._replace(x=x).added(), update, mask)
        x, normed = add_and_norm(self.pre_mlp_layernorm, stream, cast)
        return self._add_mlp(x, normed, context)

    def _cast_of(self, sublayer: nn.Module) -> InputCast | None:
        """Return the request for the fp8 casts that a sublayer accepts instead of its input. Returns None if norms are
        recomputed, because a recomputed norm does not compute casts."""
        return None if self.recompute_norms and self.training else input_cast_of(sublayer)

    def _add_attention(self, x: Tensor, normed: Tensor, context: BatchContext) -> ResidualSum:
        if self._adds_within(self.self_attention, self.post_attention_layernorm, self.attention_dropout):
            return ResidualSum(self.self_attention(normed, context, addend=x))
        y = self._of_normed(self.input_layernorm, x, normed, self.self_attention, context)
        return self._sum(x, self.post_attention_layernorm(y), self.attention_dropout, context)

    def _add_mlp(self, x: Tensor, normed: Tensor, context: BatchContext) -> ResidualSum:
        if self._adds_within(self.mlp, self.post_mlp_layernorm, self.mlp_dropout):
            return ResidualSum(self.mlp(normed, context, addend=x))
        y = self._of_normed(self.pre_mlp_layernorm, x, normed, self.mlp, context)
        return self._sum(x, self.post_mlp_layernorm(y), self.mlp_dropout, context)

    def _adds_within(self, sublayer: nn.Module, post: nn.Module, dropout: HiddenDropout) -> bool:
        """Return True if the last GEMM of a sublayer can also compute the residual addition. There must be no operation
        between the GEMM and the addition, and the norm before the sublayer must not be recomputed."""
        direct = isinstance(post, nn.Identity) and dropout.p == 0 and self.multiplier == 1
        return direct and not (self.parallel or self.recompute_norms) and takes_addend(sublayer)

    def _sum(self, x: Tensor, y: Tensor, dropout: HiddenDropout, context: BatchContext) -> ResidualSum:
        if self.multiplier != 1 or not (dropout.training and dropout.p > 0):
            return ResidualSum(x, self._scaled(dropout(y, context)))
        return ResidualSum(x, y, _mask(dropout, y, context))

    def _of_normed(
        self, norm: nn.Module, x: Tensor, normed: Tensor, sublayer: Callable[..., Tensor], context: BatchContext
    ) -> Tensor:
        """Return sublayer(normed), where `normed` is norm(x). If norms are recomputed, the backward pass computes
        `normed` again."""
        if self.recompute_norms and self.training:
            return with_recomputed((normed,), norm, x, sublayer, context)
        return sublayer(normed, context)


def input_cast_of(sublayer: nn.Module) -> InputCast | None:
    """Return the request for the fp8 casts that a sublayer's first layer accepts instead of its input. Returns None if
    anything other than this first layer reads the input, such as a hook."""
    linear = getattr(sublayer, FIRST.get(type(sublayer), ""), None)
    if type(linear) is not ColumnParallelLinear or not isinstance(linear.gemms, DelayedGemms) or not linear.compiled:
        return None
    again = isinstance(sublayer, MLP) and sublayer.recompute
    if again or observed(sublayer, linear) or not torch.is_grad_enabled():
        return None
    return InputCast(linear.gemms, linear.weight.requires_grad)


def takes_addend(sublayer: nn.Module) -> bool:
    """Return True if the last layer of a sublayer can add the sublayer's output to the residual stream."""
    linear = getattr(sublayer, LAST.get(type(sublayer), ""), None)
    return isinstance(linear, RowParallelLinear) and not observed(sublayer) and linear.takes_addend()


FIRST = {SelfAttention: "linear_qkv", SplitSelfAttention: "linear_qkv", MLP: "linear_fc1"}
LAST = {SelfAttention: "linear_proj", SplitSelfAttention: "linear_proj", MLP: "linear_fc2"}


def _mask(dropout: HiddenDropout, x: Tensor, context: BatchContext) -> DropoutMask:
    places = context.places_of(x, dropout.sequence_rank)
    return DropoutMask.of(x, dropout.p, dropout.key, context.sample_index, places)
