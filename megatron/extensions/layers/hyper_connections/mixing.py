"""Formulas of hyper-connections for the stream weights and for mixing the streams. The tensors x [..., n, h] contain n
streams of h channels. For 16-bit streams, weights and sums are computed in fp32, and the sums are then rounded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region
from megatron.core.torch_private import AutogradContext


class Epsilons(NamedTuple):
    norm: float
    """Epsilon added to the mean square over all streams of a token."""

    weights: float
    """Epsilon that is added to the input weights of a sublayer, and to the entries and sums of the mixing matrix."""


class Mix(NamedTuple):
    """Operands from which the streams after a sublayer are computed."""

    x: Tensor
    """Streams [..., n, h] before the sublayer."""

    post: Tensor
    """Factors [..., n] by which the sublayer's output is multiplied before it is added to each stream."""

    res: Tensor
    """Mixing matrix [..., n, n]. Column k contains the weights with which the old streams are summed to the new stream
    k."""

    y: Tensor
    """Output [..., h] of the sublayer."""


def doubly_stochastic(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Apply the Sinkhorn-Knopp algorithm (arXiv 2512.24880, equation 9). Return nonnegative matrices [..., n, n]. After
    enough iterations, all rows and columns of a matrix sum to 1, up to rounding and eps."""
    matrix = logits.softmax(-1) + eps
    for iteration in range(iterations):
        if iteration:
            matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    """Return the weighted sum [..., h] of the streams x [..., n, h], with weights [..., n]."""
    return _sum([w.unsqueeze(-1) * stream for w, stream in _pairs(weights, x)]).to(x.dtype)


def stream_weights(
    x: Tensor, projected: Tensor, factors: tuple[Tensor, ...], bias: Tensor, iterations: int, epsilons: Epsilons
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the input of a sublayer and the weights with which the streams are updated (arXiv 2512.24880, equations 7
    and 8).

    Args:
        x: [..., n, h], streams.
        projected: [..., n * (n + 2)], projection of the streams.
        factors: Three scalars, one each for the weights of the sublayer's input, the weights of the sublayer's output,
            and the mixing matrix. The corresponding rows of the normalized projection are multiplied by these scalars.
        bias: [n * (n + 2)], added to the scaled projection.
        iterations: Number of Sinkhorn-Knopp iterations.
        epsilons: Epsilon of the norm and epsilon of the weights.

    Returns:
        The sublayer's input [..., h], the weights `post` [..., n], and the matrix `res` [..., n, n].
    """
    n, dtype = x.shape[-2], projected.dtype
    normed = projected * _inverse_norm(x, dtype, epsilons.norm)
    pre, post, res = (
        part * factor.to(dtype) + of_part
        for part, factor, of_part in zip(
            normed.split((n, n, n * n), -1), factors, bias.to(dtype).split((n, n, n * n)), strict=True
        )
    )
    matrix = doubly_stochastic(res.unflatten(-1, (n, n)), iterations, epsilons.weights)
    return weighted_sum(pre.sigmoid() + epsilons.weights, x), 2 * post.sigmoid(), matrix


def contracted(x: Tensor, projected: Tensor, factor: Tensor, bias: Tensor, epsilons: Epsilons) -> Tensor:
    """Return the hidden states [..., h] after the last layer, a weighted sum of the streams x. The weights are computed
    from `projected` [..., n]."""
    dtype = projected.dtype
    normed = projected * _inverse_norm(x, dtype, epsilons.norm)
    return weighted_sum((normed * factor.to(dtype) + bias.to(dtype)).sigmoid() + epsilons.weights, x)


def mixed_streams(x: Tensor, post: Tensor, res: Tensor, y: Tensor) -> Tensor:
    """Return the streams after a sublayer. The new stream k is sum_j res[j, k] x[j] + post[k] y."""
    streams = (
        _sum([w.unsqueeze(-1) * stream for w, stream in _pairs(column, x)]) + of_y.unsqueeze(-1) * y
        for column, of_y in zip(res.unbind(-1), post.unbind(-1), strict=True)
    )
    return torch.stack([stream.to(x.dtype) for stream in streams], -2)


def mixed_gradients(x: Tensor, post: Tensor, res: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of all operands of `mixed_streams`."""
    wide, grads = res.dtype, [of_stream.to(res.dtype) for of_stream in grad.unbind(-2)]
    rows = zip(res.unbind(-2), x.unbind(-2), strict=True)
    dx, dres = [], []
    for row, stream in rows:
        dx.append(_sum([w.unsqueeze(-1) * g for w, g in zip(row.unbind(-1), grads, strict=True)]).to(x.dtype))
        dres.append(torch.stack([(stream.to(wide) * g).sum(-1) for g in grads], -1))
    dy = _sum([w.unsqueeze(-1) * g for w, g in zip(post.unbind(-1), grads, strict=True)]).to(y.dtype)
    dpost = torch.stack([(y.to(wide) * g).sum(-1) for g in grads], -1)
    return torch.stack(dx, -2), dpost, torch.stack(dres, -2), dy


class _MixContext(AutogradContext):
    compiled: bool


class MixFunction(torch.autograd.Function):
    """Autograd function of `mixed_streams`. Only the four operands are saved for the backward pass."""

    @staticmethod
    def forward(ctx: _MixContext, x: Tensor, post: Tensor, res: Tensor, y: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(x, post, res, y)
        ctx.compiled = compiled
        return region(mixed_streams, compiled)(x, post, res, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: _MixContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, post, res, y = ctx.saved_tensors
        return *region(mixed_gradients, ctx.compiled, static=True)(x, post, res, y, grad), None


def _inverse_norm(x: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """Return the inverse root mean square [..., 1] over all streams of each token."""
    return torch.rsqrt(x.to(dtype).square().mean((-2, -1)) + eps).unsqueeze(-1)


def _pairs(weights: Tensor, x: Tensor) -> zip[tuple[Tensor, Tensor]]:
    return zip(weights.unbind(-1), x.unbind(-2), strict=True)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return reduce(add, terms)
