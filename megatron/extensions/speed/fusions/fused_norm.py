"""RMSNorm and LayerNorm fused with the residual addition. One kernel computes the sum x + update and the norm of this
sum. The backward pass computes the gradients of x, update, weight and bias in one pass over the operands.

The fusion needs `--compile`. torch's own norms are separate kernels. With separate kernels, a residual addition would
read and write the residual stream once more in both the forward and the backward pass. In addition, a separate kernel
for the norm's weight gradient would read both operands of this gradient again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region
from megatron.core.dropout import drop_at_once, mask_bits
from megatron.core.tensor_parallel.layers import observed
from megatron.core.tensor_parallel.linear_gemms import OutputGradient, gradient_of_output, rows_of
from megatron.core.torch_private import AutogradContext
from megatron.core.transformer.norm import LayerNorm, RMSNorm
from megatron.extensions.speed.fp8.casts import CastOrder, CastPair
from megatron.extensions.speed.fp8.recipes import DelayedGemms
from megatron.extensions.speed.fusions.kernels.norms import Norm, NormBackward, norm_cast, norm_gradients
from megatron.extensions.speed.fusions.kernels.norms import gradients_of_norm as _backward
from megatron.extensions.speed.fusions.kernels.norms import normalized as _normalized


class InputCast(NamedTuple):
    """Request for fp8 casts of a layer's input."""

    gemms: DelayedGemms
    needs_dw: bool

    def order(self) -> CastOrder:
        return self.gemms.input_order(self.needs_dw)

    def stand_in(self, pair: CastPair, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a placeholder for the layer's input: a NaN tensor [s, b, h] that is expanded from a single element.
        The layer reads the casts from the placeholder's attribute `given_casts`. Other layers must not receive the
        placeholder. In the backward pass, the gradient of the placeholder is the gradient of the input."""
        found = self.gemms.no_value(dtype).expand(shape)
        found.given_casts = self.gemms.given_input(pair, shape[:-1])  # type: ignore[attr-defined]
        return found


class DropoutMask(NamedTuple):
    """Dropout mask for hidden states [s, b, h], in the form that compiled kernels use. Elements are dropped with
    probability p."""

    p: float
    row_bits: Tensor
    """Dropout hash of each row, [s * b] int32."""
    column_bits: Tensor
    """Dropout hash of each column, [h] int32."""

    @classmethod
    def of(cls, x: Tensor, p: float, key: int, sample_index: Tensor, seq_offset: int | Tensor = 0) -> DropoutMask:
        """Return the mask that `dropout` applies to x when it is called with these arguments."""
        return cls(p, *mask_bits(x, key, sample_index, seq_offset))

    def applied(self, x: Tensor) -> Tensor:
        """Apply dropout to x [s, b, h] within a compiled region: dropped elements are 0, and the other elements are
        multiplied by 1 / (1 - p)."""
        return drop_at_once(x, *self)


def add_update(x: Tensor, update: Tensor, mask: DropoutMask | None) -> Tensor:
    """Compute x + dropout(update) in one kernel. If there is no dropout mask, return x + update."""
    return x + update if mask is None else _AddDropped.apply(x, update, mask)


class _AddDroppedContext(AutogradContext):
    p: float


class _AddDropped(torch.autograd.Function):
    """Autograd function for x + dropout(update)."""

    @staticmethod
    def forward(ctx: _AddDroppedContext, x: Tensor, update: Tensor, mask: DropoutMask) -> Tensor:
        ctx.save_for_backward(*mask[1:])
        ctx.p = mask.p
        return region(_added_dropped, True)(x, update, *mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: _AddDroppedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, region(drop_at_once, True)(grad, ctx.p, *ctx.saved_tensors), None


def _added_dropped(x: Tensor, update: Tensor, p: float, row_bits: Tensor, column_bits: Tensor) -> Tensor:
    return x + drop_at_once(update, p, row_bits, column_bits)


class ResidualSum(NamedTuple):
    """Residual stream x and a pending update, such as a sublayer's output, that is not yet added to x. The next norm
    computes the sum x + dropout(update)."""

    x: Tensor
    update: Tensor | None = None
    mask: DropoutMask | None = None

    def added(self) -> Tensor:
        return self.x if self.update is None else add_update(self.x, self.update, self.mask)


class FusedLayerNorm(LayerNorm):
    """`LayerNorm` whose kernels also add the update of a `ResidualSum` to the residual stream if gradients are
    enabled."""

    centered = True

    @overload
    def forward(
        self, x: Tensor | ResidualSum, residual: Literal[False] = False, cast: InputCast | None = None
    ) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor | ResidualSum, residual: Literal[True], cast: InputCast | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, x: Tensor | ResidualSum, residual: bool = False, cast: InputCast | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of x [..., h]. If `residual` is True, return the residual sum and its norm, like
        `add_and_norm`."""
        stream = x if isinstance(x, ResidualSum) else ResidualSum(x)
        if self.fuses():
            assert self.weight is not None
            norm = Norm(self.weight, self.bias, self.eps, self.centered, self.one_plus)
            found = fused_norm(stream.x, stream.update, norm, stream.mask, cast)
        else:
            total = stream.added()
            found = total, super().forward(total)
        return found if residual else found[1]

    def fuses(self) -> bool:
        """Return True if the fused kernels support this norm. The kernels require a weight and, if a mean is
        subtracted, a bias."""
        usual = self.weight is not None and (self.bias is not None) == self.centered
        return usual and torch.is_grad_enabled()

    def takes_pending(self) -> bool:
        return self.fuses() and not observed(self)


class FusedRMSNorm(FusedLayerNorm, RMSNorm):
    """`RMSNorm` whose kernels also add the update of a `ResidualSum` to the residual stream, as in `FusedLayerNorm`."""

    centered = False


def add_and_norm(norm: nn.Module, stream: ResidualSum, cast: InputCast | None = None) -> tuple[Tensor, Tensor]:
    """Return the residual sum and the norm of this sum. If the norm supports the fusion, the forward pass and the
    backward pass are one kernel each. If the only layer that reads the norm requests a `cast`, the returned norm may be
    a placeholder that carries only the fp8 casts (`InputCast.stand_in`).

    After the call, use the returned sum instead of `stream.x`, even if there is no update. In the backward pass, the
    norm kernel then adds the gradient of the returned sum to the gradient through the norm.
    """
    if isinstance(norm, FusedLayerNorm):
        found: tuple[Tensor, Tensor] = norm(stream, residual=True, cast=None if observed(norm) else cast)
        return found
    x = stream.added()
    return x, norm(x)


def fused_norm(
    x: Tensor, update: Tensor | None, norm: Norm, mask: DropoutMask | None = None, cast: InputCast | None = None
) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + update and its norm over the last dimension. If there is no update, return x and
    the norm of x. After the call, use the returned residual stream instead of the argument x. The backward kernel of
    the norm then adds the gradient of this residual stream to the gradient through the norm.

    Args:
        x: Residual stream [..., h].
        update: Tensor [..., h] to add to x. If None, nothing is added.
        norm: Norm of the sum. 16-bit operands are normalized in fp32.
        mask: Dropout mask of the update, for x [s, b, h].
        cast: Request of the next layer for fp8 casts of the norm's output. If there is no dropout mask, the second
            result is a placeholder that carries these casts (`InputCast.stand_in`).

    The update (or x, if there is no update) may be the output of a linear layer. If there is no dropout mask, the
    backward pass of the norm then also casts the output gradient of this layer to fp8 and sums it. The backward pass of
    the layer uses the casts and the sum.
    """
    output = x if update is None else update
    cast, of_update = (cast, gradient_of_output(output)) if mask is None else (None, None)
    return _FusedNorm.apply(x, update, norm.weight, norm.bias, norm, mask, cast, of_update)


class _FusedNormContext(AutogradContext):
    p: float | None
    """Dropout probability; None if there is no dropout mask."""
    of_update: OutputGradient | None
    one_plus: bool
    adds: bool


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _FusedNormContext,
        x: Tensor,
        update: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm,
        mask: DropoutMask | None,
        cast: InputCast | None,
        of_update: OutputGradient | None,
    ) -> tuple[Tensor, Tensor]:
        if cast is not None:
            made = norm_cast(_rows(x), None if update is None else _rows(update), norm, cast.order())
            total = x if update is None else made.total.view(x.shape)
            normed = cast.stand_in(made.pair, x.shape, x.dtype)
            statistics = [part.view(*x.shape[:-1], 1) for part in made.statistics]
        elif update is None:
            total, (normed, *statistics) = x, region(_normalized, True, static=True)(x, norm)
        else:
            total, normed, *statistics = region(_added_and_normalized, True, static=True)(x, update, mask, norm)
        bits = () if mask is None else mask[1:]
        ctx.save_for_backward(total, weight, *bits, *statistics)
        ctx.p = None if mask is None else mask.p
        ctx.of_update = of_update
        ctx.one_plus = norm.one_plus
        ctx.adds = update is not None
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _FusedNormContext, of_total: Tensor | None, of_normed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, *kept = ctx.saved_tensors
        mask = None if ctx.p is None else DropoutMask(ctx.p, *kept[:2])
        statistics = tuple(kept if mask is None else kept[2:])
        if of_normed is None:
            of_normed = torch.zeros_like(total)
        operands = total, of_total, of_normed, weight, statistics, ctx.one_plus
        if ctx.of_update is not None and ctx.needs_input_grad[ctx.adds]:
            dx, of_update, of_weight, *of_bias = _with_casts_and_sum(ctx.of_update, operands)
        else:
            dx, of_update, of_weight, *of_bias = region(_backward_of_both, True, static=True)(mask, *operands)
        of_update = dx if of_update is None else of_update
        return dx, of_update if ctx.needs_input_grad[1] else None, of_weight, *(of_bias or [None]), *[None] * 4


def _rows(x: Tensor) -> Tensor:
    return rows_of(x).contiguous()


def _with_casts_and_sum(of_update: OutputGradient, operands: NormBackward) -> tuple[Tensor | None, ...]:
    """Compute the same gradients as `_backward_of_both`, for a norm without a dropout mask. In addition, pass the
    update's gradient, as fp8 casts and as a sum over rows, to the linear layer that computed the update."""
    total, of_total, of_normed, weight, statistics, one_plus = operands
    of_sum = None if of_total is None else _rows(of_total)
    of_rows = tuple(part.view(-1, 1) for part in statistics)
    sums = of_update.needs_sum
    order = of_update.order()
    found = norm_gradients(_rows(total), of_sum, _rows(of_normed), weight, of_rows, one_plus, sums, order)
    dx = found.of_total.view(total.shape)
    of_update.put(dx, found.pair, found.row_sum)
    return dx, None, *found.of_parameters


def _added_and_normalized(x: Tensor, update: Tensor, mask: DropoutMask | None, norm: Norm) -> tuple[Tensor, ...]:
    """Return the sum x + update, followed by the tensors that `_normalized` returns for this sum."""
    total = x + (update if mask is None else mask.applied(update))
    return total, *_normalized(total, norm)


def _backward_of_both(mask: DropoutMask | None, *operands: *NormBackward) -> tuple[Tensor | None, ...]:
    """Compute the results of `_backward`, and insert the gradient of the update as the second result. Without dropout,
    the second result is None, because this gradient equals the gradient of x."""
    dx, *of_parameters = _backward(*operands)
    return dx, None if mask is None else mask.applied(dx), *of_parameters
