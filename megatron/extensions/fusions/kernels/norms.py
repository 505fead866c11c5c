"""RMSNorm and LayerNorm with the residual addition before them, and what else their passes over the operands can make.

Forward: the norm cast to fp8 by rows and by columns, in place of the norm. Backward: the casts of the gradient of the
sum, which is that of the output of the linear layer before, and its sum over tokens, which is that of its bias. What is
cast or summed is rounded to 16 bits all the same: the results are those of separate kernels, but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.parts import operation
from megatron.extensions.fp8.cast_transpose import CastOrder, CastPair, cast_transpose_with_amax_twin, note
from megatron.extensions.fusions.kernel_choice import FusedKernel, RunShapes, runs_triton
from megatron.extensions.fusions.kernels.cast_transpose import TOLERANCE, made_casts, order_of, paired, wide

WIDEST = 2**14
"""Elements of the longest rows whose kernels are Triton's: a program of the forward holds whole rows in registers."""


class NormedCast(NamedTuple):
    """The sum [n, h], its statistics [n, 1] in fp32 (1 / deviation, and of LayerNorm the mean), and the casts of its
    norm."""

    total: Tensor
    statistics: tuple[Tensor, ...]
    pair: CastPair


class NormGradients(NamedTuple):
    """Gradients of the sum [n, h] and of the parameters [h], and where they are asked for, the sum of the first over
    rows [h] and its casts."""

    of_total: Tensor
    of_parameters: list[Tensor]
    row_sum: Tensor | None
    pair: CastPair | None


@operation
def norm_cast(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
    cast: CastOrder,
) -> NormedCast:
    """x + update of x, update [n, h], and the norm of that, cast; the total is x itself without an update."""
    settings = weight, bias, eps, centered, one_plus
    twin = region(norm_cast_twin, True, static=True)
    total, statistics, pair, amax = twin(x, update, *settings, cast.multiplier, cast.wanted, cast.dtype)
    note(cast.noted, amax)
    return NormedCast(x if total is None else total, statistics, pair)


def _by_triton(x: Tensor, update: Tensor | None, *settings_and_cast: Any) -> NormedCast:
    *settings, cast = settings_and_cast
    made = _norm_cast(x, update, *settings, cast.multiplier, cast.noted, *cast.wanted, cast.dtype)
    total, centered = x if update is None else made.pop(0), settings[3]
    statistics = tuple(made.pop(0) for _ in range(1 + centered))
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
    """Gradients from those of the sum, `of_total`, and of its norm, [n, h]. With `sums` the sum over rows as well, with
    `cast` the casts."""
    operands = total, of_total, of_normed, weight, statistics, one_plus, sums
    wanted = (False, False) if cast is None else cast.wanted
    twin = region(norm_gradients_twin, True, static=True)
    gradients, amax = twin(
        *operands, None if cast is None else cast.multiplier, wanted, None if cast is None else cast[3]
    )
    if cast is not None and amax is not None:
        note(cast.noted, amax)
    return gradients


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
    wanted = (False, False) if cast is None else cast.wanted
    order = (None, None, False, False, torch.float8_e5m2) if cast is None else (*cast[:2], *wanted, cast.dtype)
    dx, summed, *made = _norm_gradients(total, of_total, of_normed, weight, list(statistics), one_plus, sums, *order)
    of_parameters, row_sum = [*summed[: len(statistics)]], summed[-1] if sums else None
    return NormGradients(dx, of_parameters, row_sum, None if cast is None else paired(made[:-1], made[-1:], wanted))


def _fits(x: Tensor, *_: Any) -> bool:
    """Whether kernels on rows x [n, h] are Triton's, which compute in fp32."""
    return runs_triton(x) and x.numel() > 0 and x.shape[1] <= WIDEST and x.dtype != torch.float64


def normalized(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, one_plus: bool
) -> tuple[Tensor, ...]:
    """(norm of each row of x [..., h], 1 / its standard deviation or root mean square, and of LayerNorm its mean)"""
    rows = wide(x)
    mean = rows.mean(-1, keepdim=True) if centered else None
    rows = rows if mean is None else rows - mean
    inverse = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    normed = rows * inverse * _scale(weight, one_plus)
    normed = normed if bias is None else normed + wide(bias)
    return (normed.to(x.dtype), inverse) if mean is None else (normed.to(x.dtype), inverse, mean)


def gradients_of_norm(
    x: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    one_plus: bool,
) -> tuple[Tensor, ...]:
    """Gradients of x, with that of the residual stream, of the weight, and for LayerNorm of the bias.

    With z the normalized row and g its gradient: dx = (g - z mean(g z) - mean(g)) / deviation; RMSNorm has no mean(g).
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


def norm_cast_twin(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
    multiplier: Tensor,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
) -> tuple[Tensor | None, tuple[Tensor, ...], CastPair, Tensor]:
    """`norm_cast` in torch, but for the note: the total if there is an update, statistics, casts and the amax."""
    total = x if update is None else x + update
    normed, *statistics = normalized(total, weight, bias, eps, centered, one_plus)
    pair, amax = cast_transpose_with_amax_twin(normed, multiplier, wanted, dtype)
    return None if update is None else total, tuple(statistics), pair, amax


def norm_gradients_twin(
    total: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, ...],
    one_plus: bool,
    sums: bool,
    multiplier: Tensor | None,
    wanted: tuple[bool, bool],
    dtype: torch.dtype | None,
) -> tuple[NormGradients, Tensor | None]:
    """`norm_gradients` in torch, but for the note: also returns the amax."""
    dx, *of_parameters = gradients_of_norm(total, of_total, of_normed, weight, statistics, one_plus)
    row_sum = wide(dx).sum(0).to(dx.dtype) if sums else None
    pair = amax = None
    if multiplier is not None and dtype is not None:
        pair, amax = cast_transpose_with_amax_twin(dx, multiplier, wanted, dtype)
    return NormGradients(dx, of_parameters, row_sum, pair), amax


@torch.library.custom_op("megatron::norm_cast", mutates_args=("noted",), device_types="cuda")
def _norm_cast(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
    multiplier: Tensor,
    noted: Tensor | None,
    rows: bool,
    columns: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The total, if there is an update, statistics, casts by rows and by columns, as wanted, and their scale."""
    from megatron.extensions.fusions.kernels import norms_triton

    settings = weight, bias, eps, centered, one_plus
    return norms_triton.norm_cast(x, update, *settings, multiplier, noted, (rows, columns), dtype)


@_norm_cast.register_fake
def _(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, *rest: Any
) -> list[Tensor]:
    statistics = [x.new_empty((x.shape[0], 1), dtype=torch.float32) for _ in range(1 + centered)]
    casts = made_casts(x, (x.shape[0], x.shape[1]), *rest[-3:])
    return [*([] if update is None else [torch.empty_like(x)]), *statistics, *casts]


@torch.library.custom_op("megatron::norm_gradients", mutates_args=("noted",), device_types="cuda")
def _norm_gradients(
    total: Tensor,
    of_total: Tensor | None,
    of_normed: Tensor,
    weight: Tensor,
    statistics: list[Tensor],
    one_plus: bool,
    sums: bool,
    multiplier: Tensor | None,
    noted: Tensor | None,
    rows: bool,
    columns: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Gradients of the total, and in one tensor [., h] of the parameters and with `sums` the sum of the first; with a
    multiplier casts by rows and by columns, as wanted, and their scale."""
    from megatron.extensions.fusions.kernels import norms_triton

    operands = total, of_total, of_normed, weight, statistics, one_plus, sums
    return norms_triton.norm_gradients(*operands, multiplier, noted, (rows, columns), dtype)


@_norm_gradients.register_fake
def _(
    total: Tensor, of_total: Tensor | None, of_normed: Tensor, weight: Tensor, statistics: list[Tensor], *rest: Any
) -> list[Tensor]:
    _, sums, multiplier, _, *cast = rest
    summed = weight.new_empty(len(statistics) + sums, total.shape[1])
    casts = [] if multiplier is None else made_casts(total, (total.shape[0], total.shape[1]), *cast)
    return [torch.empty_like(total), summed, *casts]


def _rows(shapes: RunShapes) -> tuple[Tensor, Tensor, Tensor]:
    """A stream, an update and the weight of a norm."""
    x, update = (shapes.random(shapes.tokens, shapes.hidden).mul_(scale) for scale in (1.0, 0.5))
    return x, update, shapes.random(shapes.hidden)


def _cast_samples(shapes: RunShapes) -> Iterator[tuple[Any, ...]]:
    if shapes.fp8 == "delayed":
        x, update, weight = _rows(shapes)
        yield x, update, weight, None, 1e-5, False, False, order_of(x)


def _gradient_samples(shapes: RunShapes) -> Iterator[tuple[Any, ...]]:
    x, grad, weight = _rows(shapes)
    statistics = (normalized(x, weight, None, 1e-5, False, False)[1],)
    cast = order_of(grad, torch.float8_e5m2) if shapes.fp8 == "delayed" else None
    yield x, grad, grad, weight, statistics, False, True, cast


NORM_CAST = FusedKernel(_by_triton, norm_cast, _fits, _cast_samples, TOLERANCE)
NORM_GRADIENTS = FusedKernel(_gradients_by_triton, norm_gradients, _fits, _gradient_samples, TOLERANCE)
