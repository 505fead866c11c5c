"""Kernels for RMSNorm and LayerNorm that also compute the preceding residual addition, fp8 casts and bias gradients in
the same pass over the operands.

The forward pass returns fp8 casts of the norm, by rows and by columns, instead of the norm. The gradient of the
residual sum is the output gradient of the previous linear layer. The backward pass also returns the fp8 casts of the
residual sum's gradient, and the sum of this gradient over tokens, which is the bias gradient of the previous linear
layer. As with separate kernels, values are rounded to 16 bits before they are cast or summed. The results therefore
equal those of separate kernels, except that sums may be computed in a different order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.kernels import operation
from megatron.extensions.speed.fp8.casts import CastOrder, CastPair, CastParts, cast_transpose_with_amax_twin, noting
from megatron.extensions.speed.fusions.kernel_choice import FusedKernel, RunShapes, gpu_operator, runs_triton
from megatron.extensions.speed.fusions.kernels.casts import CAST, TOLERANCE, made_casts, order_of, paired, wide

WIDEST = 2**14
"""Maximum row length for which Triton kernels are used. The limit exists because a program of the forward kernel holds
whole rows in registers."""


class Norm(NamedTuple):
    """Norm over the last dimension: LayerNorm (arXiv:1607.06450) if `centered`, otherwise RMSNorm (arXiv:1910.07467).
    If `one_plus` is True, 1 is added to the weight."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool
    one_plus: bool


class NormedCast(NamedTuple):
    """Result of `norm_cast`: the sum x + update [n, h], the fp32 statistics [n, 1] of the sum's rows, and the casts of
    the sum's norm. The statistics are the inverse standard deviation (LayerNorm) or root mean square (RMSNorm) and, for
    LayerNorm, the mean."""

    total: Tensor
    statistics: tuple[Tensor, ...]
    pair: CastPair


NormBackward = tuple[Tensor, Tensor | None, Tensor, Tensor, tuple[Tensor, ...], bool]
"""Operands of `gradients_of_norm`."""


class NormGradients(NamedTuple):
    """Result of `norm_gradients`: the gradient [n, h] of the sum x + update, and the gradients [h] of the parameters.
    On request, `NormGradients` also contains the casts of the gradient [n, h], and the sum [h] of this gradient over
    rows."""

    of_total: Tensor
    of_parameters: list[Tensor]
    row_sum: Tensor | None
    pair: CastPair | None


@operation
def norm_cast(x: Tensor, update: Tensor | None, norm: Norm, cast: CastOrder) -> NormedCast:
    """Compute x + update and the casts of the norm of this sum.

    Args:
        x: Residual stream [n, h].
        update: Addend [n, h]. If None, x is normalized without an addition.
        norm: Norm of the sum.
        cast: Requested casts of the norm.
    """
    total, statistics, pair = noting(norm_cast_twin, True, cast, x, update, norm)
    return NormedCast(x if total is None else total, statistics, pair)


def _by_triton(x: Tensor, update: Tensor | None, norm: Norm, cast: CastOrder) -> NormedCast:
    made = _norm_cast(x, update, *norm, *cast)
    total = x if update is None else made.pop(0)
    statistics = tuple(made.pop(0) for _ in range(1 + norm.centered))
    return NormedCast(total, statistics, paired(made[:-1], made[-1:], cast.wanted))


@operation
def norm_gradients(
    total: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, ...],
    one_plus: bool,
    sums: bool,
    cast: CastOrder | None,
) -> NormGradients:
    """Compute the gradients of the residual sum and of the norm's parameters.

    Args:
        total: Residual sum x + update, [n, h], which is the input of the norm.
        of_total: Gradient of the residual sum [n, h] from uses other than the norm, if any.
        of_normed: Gradient of the norm's output, [n, h].
        weight: Weight of the norm.
        statistics: Statistics from `norm_cast`.
        one_plus: Whether 1 is added to the weight.
        sums: Whether to sum the gradient of the residual sum over rows.
        cast: Requested casts of the gradient of the residual sum, if any.
    """
    operands = total, of_total, of_normed, weight, statistics, one_plus, sums
    if cast is None:
        return region(norm_gradients_twin, True, static=True)(*operands, None)[0]
    return noting(norm_gradients_twin, True, cast, *operands)


def _gradients_by_triton(
    total: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, ...],
    one_plus: bool,
    sums: bool,
    cast: CastOrder | None,
) -> NormGradients:
    assert cast is not None
    operands = total, of_total, of_normed, weight, list(statistics), one_plus, sums
    dx, summed, *made = _norm_gradients(*operands, *cast)
    of_parameters, row_sum = [*summed[: len(statistics)]], summed[-1] if sums else None
    return NormGradients(dx, of_parameters, row_sum, paired(made[:-1], made[-1:], cast.wanted))


def _fits(x: Tensor, *_: object) -> bool:
    """Return True if Triton kernels, which compute in fp32, support the rows x [n, h]."""
    return runs_triton(x) and x.numel() > 0 and x.shape[1] <= WIDEST and x.dtype != torch.float64


def _fits_with_cast(total: Tensor, *operands_and_cast: object) -> bool:
    """Return True if Triton kernels are used for these operands. Triton kernels are used only if a cast is requested.
    Without a cast, torch's compiled norm is faster. On an H200, torch's norm usually takes 0.81 to 0.89 of the Triton
    kernel's time."""
    return operands_and_cast[-1] is not None and _fits(total)


def normalized(x: Tensor, norm: Norm) -> tuple[Tensor, ...]:
    """Normalize each row of x [..., h]. Returns the normalized rows, the inverse of each row's standard deviation
    (LayerNorm) or root mean square (RMSNorm) and, for LayerNorm, each row's mean."""
    rows = wide(x)
    mean = rows.mean(-1, keepdim=True) if norm.centered else None
    rows = rows if mean is None else rows - mean
    inverse = torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps)
    normed = rows * inverse * _scale(norm.weight, norm.one_plus)
    normed = normed if norm.bias is None else normed + wide(norm.bias)
    return (normed.to(x.dtype), inverse) if mean is None else (normed.to(x.dtype), inverse, mean)


def gradients_of_norm(
    x: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    one_plus: bool,
) -> tuple[Tensor, ...]:
    """Compute the gradients of x, of the weight and, for LayerNorm, of the bias.

    For the normalized row z and its gradient g, dx = (g - z mean(g z) - mean(g)) / deviation. The term mean(g) is
    absent for RMSNorm.

    Args:
        x: Input of the norm, [..., h].
        of_total: Gradient of x from uses other than the norm, such as the residual stream.
        of_normed: Gradient of the norm's output.
        weight: Weight of the norm.
        statistics: Statistics from `normalized`.
        one_plus: Whether 1 is added to the weight.
    """
    inverse, *means = statistics
    dy, whole = wide(of_normed), wide(x)
    z = (whole - means[0] if means else whole) * inverse
    g = dy * _scale(weight, one_plus)
    dx = g - z * (g * z).mean(-1, keepdim=True)
    dx = (dx - g.mean(-1, keepdim=True) if means else dx) * inverse
    dx = dx if of_total is None else dx + of_total
    rows = tuple(range(x.ndim - 1))
    of_weight = (dy * z).sum(rows).to(weight.dtype)
    return (dx.to(x.dtype), of_weight, dy.sum(rows).to(weight.dtype)) if means else (dx.to(x.dtype), of_weight)


def _scale(weight: Tensor, one_plus: bool) -> Tensor:
    return wide(weight) + 1 if one_plus else wide(weight)


Normed = tuple[Tensor | None, tuple[Tensor, ...], CastPair]


def norm_cast_twin(x: Tensor, update: Tensor | None, norm: Norm, cast: CastOrder) -> tuple[Normed, Tensor]:
    """Compute `norm_cast` in plain torch. Returns a tuple (total, statistics, casts), and the amax. The total is None
    if there is no update. Unlike `norm_cast`, this function does not record the amax."""
    total = x if update is None else x + update
    normed, *statistics = normalized(total, norm)
    pair, amax = cast_transpose_with_amax_twin(normed, cast)
    return (None if update is None else total, tuple(statistics), pair), amax


def norm_gradients_twin(
    total: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, ...],
    one_plus: bool,
    sums: bool,
    cast: CastOrder | None,
) -> tuple[NormGradients, Tensor | None]:
    """Plain-torch version of `norm_gradients` that returns the amax instead of recording it."""
    dx, *of_parameters = gradients_of_norm(total, of_total, of_normed, weight, statistics, one_plus)
    row_sum = wide(dx).sum(0).to(dx.dtype) if sums else None
    pair, amax = (None, None) if cast is None else cast_transpose_with_amax_twin(dx, cast)
    return NormGradients(dx, of_parameters, row_sum, pair), amax


def _fake_norm_cast(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
    *cast: *CastParts,
) -> list[Tensor]:
    statistics = [x.new_empty((x.shape[0], 1), dtype=torch.float32) for _ in range(1 + centered)]
    casts = made_casts(x, (x.shape[0], x.shape[1]), *cast)
    return [*([] if update is None else [torch.empty_like(x)]), *statistics, *casts]


def _fake_gradients(
    total: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: list[Tensor],
    one_plus: bool,
    sums: bool,
    *cast: *CastParts,
) -> list[Tensor]:
    summed = weight.new_empty(len(statistics) + sums, total.shape[1])
    return [torch.empty_like(total), summed, *made_casts(total, (total.shape[0], total.shape[1]), *cast)]


_norm_cast = gpu_operator(
    "kernels.norms_triton:norm_cast",
    f"(Tensor x, Tensor? update, Tensor weight, Tensor? bias, float eps, bool centered, bool one_plus, {CAST}) "
    "-> Tensor[]",
    _fake_norm_cast,
)
"""Operator that returns a list of tensors. If there is an update, the first tensor is x + update. The next tensors are
the statistics of the norm, the requested casts of the norm (by rows, then by columns), and the scale of the casts."""

_norm_gradients = gpu_operator(
    "kernels.norms_triton:norm_gradients",
    "(Tensor total, Tensor? of_total, Tensor of_normed, Tensor weight, Tensor[] statistics, bool one_plus, bool sums, "
    f"{CAST}) -> Tensor[]",
    _fake_gradients,
)
"""Operator that returns a list of tensors. The first tensor is the gradient dx of the norm's input. The second tensor
has rows of length h: the weight gradient, the bias gradient (LayerNorm) and, if `sums` is True, the sum of dx over
tokens. The remaining tensors are the requested casts of dx, by rows and by columns, and their scale."""


def _rows(shapes: RunShapes) -> tuple[Tensor, Tensor, Norm]:
    """Return random operands: a residual stream, an update and a norm."""
    x, update = (shapes.random(shapes.tokens, shapes.hidden).mul_(scale) for scale in (1.0, 0.5))
    return x, update, Norm(shapes.random(shapes.hidden), None, 1e-5, False, False)


def _cast_samples(shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor, Norm, CastOrder]]:
    if shapes.fp8 == "delayed":
        x, update, norm = _rows(shapes)
        yield x, update, norm, order_of(x)


def _gradient_samples(shapes: RunShapes) -> Iterator[tuple[*NormBackward, bool, CastOrder]]:
    if shapes.fp8 == "delayed":
        x, grad, norm = _rows(shapes)
        statistics = (normalized(x, norm)[1],)
        yield x, grad, grad, norm.weight, statistics, False, True, order_of(grad, torch.float8_e5m2)


NORM_CAST = FusedKernel(_by_triton, norm_cast, _fits, _cast_samples, TOLERANCE)
NORM_GRADIENTS = FusedKernel(_gradients_by_triton, norm_gradients, _fits_with_cast, _gradient_samples, TOLERANCE)
