"""RMSNorm and LayerNorm fused with the residual stream: x + update and its norm in one kernel, and in the backward the
gradient of both, with those of weight and bias, in one pass over the operands.

For `--compile`. torch's own norms are separate kernels: with them, a residual addition reads and writes the stream once
more in the forward and in the backward, and the weight's gradient reads both operands again.
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
    """Casts that a layer wants for its input."""

    gemms: DelayedGemms
    needs_dw: bool

    def order(self) -> CastOrder:
        return self.gemms.input_order(self.needs_dw)

    def stand_in(self, pair: CastPair, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of NaN [s, b, h], in the memory of one number, that carries the casts to the layer and the gradient
        back. Only a layer that reads `given_input` may have it as input."""
        found = self.gemms.no_value(dtype).expand(shape)
        found.given_casts = self.gemms.given_input(pair, shape[:-1])  # type: ignore[attr-defined]
        return found


class DropoutMask(NamedTuple):
    """Dropout mask for hidden states [s, b, h] with probability p, as applied by a compiled kernel."""

    p: float
    row_bits: Tensor
    """[s * b] int32"""
    column_bits: Tensor
    """[h] int32"""

    @classmethod
    def of(cls, x: Tensor, p: float, key: int, sample_index: Tensor, seq_offset: int | Tensor = 0) -> DropoutMask:
        """Mask with which `dropout` of these arguments drops elements of x."""
        return cls(p, *mask_bits(x, key, sample_index, seq_offset))

    def applied(self, x: Tensor) -> Tensor:
        """Within a region: x [s, b, h], with zeros where it is dropped, and otherwise times 1 / (1 - p)."""
        return drop_at_once(x, *self)


def add_update(x: Tensor, update: Tensor, mask: DropoutMask | None) -> Tensor:
    """x + dropout of `update` by a mask, in one kernel; x + update without a mask."""
    return x + update if mask is None else _AddDropped.apply(x, update, mask)


class _AddDroppedContext(AutogradContext):
    p: float


class _AddDropped(torch.autograd.Function):
    """x + update, with dropout applied to the update."""

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
    """Residual stream with an addition that the next norm computes: x + dropout of the update."""

    x: Tensor
    update: Tensor | None = None
    mask: DropoutMask | None = None

    def added(self) -> Tensor:
        return self.x if self.update is None else add_update(self.x, self.update, self.mask)


class FusedLayerNorm(LayerNorm):
    """`LayerNorm` of a stream whose addition it computes in its own kernels, if there will be a backward."""

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
        """The norm of x [..., h], or with `residual` (the sum, its norm): see `add_and_norm`."""
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
        """The kernels require a weight, and a bias if a mean is subtracted."""
        usual = self.weight is not None and (self.bias is not None) == self.centered
        return usual and torch.is_grad_enabled()

    def takes_pending(self) -> bool:
        return self.fuses() and not observed(self)


class FusedRMSNorm(FusedLayerNorm, RMSNorm):
    """`RMSNorm`, in the same way."""

    centered = False


def add_and_norm(norm: nn.Module, stream: ResidualSum, cast: InputCast | None = None) -> tuple[Tensor, Tensor]:
    """(the sum, its norm), for any norm; in one kernel forward and backward if the norm supports it. With a `cast` for
    the layer that alone reads the norm, the norm may be a stand-in.

    Use the first result in place of `stream.x`, even without an update: the backward then adds its gradient to the
    norm's.
    """
    if isinstance(norm, FusedLayerNorm):
        found: tuple[Tensor, Tensor] = norm(stream, residual=True, cast=None if observed(norm) else cast)
        return found
    x = stream.added()
    return x, norm(x)


def fused_norm(
    x: Tensor, update: Tensor | None, norm: Norm, mask: DropoutMask | None = None, cast: InputCast | None = None
) -> tuple[Tensor, Tensor]:
    """(x + update, its norm over the last dim): x, update [..., h] -> [..., h] twice, in fp32 for 16-bit operands.
    Without an update (x, its norm): use that x in place of the argument, so that its gradient is added in the backward
    of the norm.

    With a `mask`, this is x + dropout of the update, for x [s, b, h].

    With a `cast`, and without a mask, the norm is a stand-in that carries its casts. If the update, or x if there is
    none, is the output of a linear layer, the backward makes the casts and sums that this layer needs of its gradient.
    """
    output = x if update is None else update
    cast, of_update = (cast, gradient_of_output(output)) if mask is None else (None, None)
    return _FusedNorm.apply(x, update, norm.weight, norm.bias, norm, mask, cast, of_update)


class _FusedNormContext(AutogradContext):
    p: float | None
    """Fields of a dropout mask; None without one."""
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
    """`_backward_of_both` without a mask, which hands over the casts and the sum of the update's gradient."""
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
    """(x + update, and the results of `_normalized` for it)"""
    total = x + (update if mask is None else mask.applied(update))
    return total, *_normalized(total, norm)


def _backward_of_both(mask: DropoutMask | None, *operands: *NormBackward) -> tuple[Tensor | None, ...]:
    """`_backward`, followed by the gradient of the update if dropout makes it differ from that of x, and otherwise by
    None."""
    dx, *of_parameters = _backward(*operands)
    return dx, None if mask is None else mask.applied(dx), *of_parameters
