"""Collectives along one mesh axis, and the pairs of them that autograd needs.

`all_reduce_`, `all_gather` and `reduce_scatter` wait for what `collectives` starts. Built on them, `copy_to`,
`reduce_from`, ... are differentiable. Each is one of a pair of adjoint linear maps, so its backward is the other one:
identity with all-reduce, slice with all-gather, all-gather with reduce-scatter.

On an axis of size 1 all of them return their input and touch no process group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.collectives import part_length, start_all_gather, start_reduce_scatter


def all_reduce_(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces the contiguous `x` over the axis, in place."""
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """x [..., n, ...] -> [..., n * size, ...]"""
    gathered = start_all_gather(x, axis).wait()
    if axis.size == 1 or dim % x.ndim == 0:
        return gathered
    return torch.cat(gathered.chunk(axis.size), dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """x [..., n * size, ...] -> [..., n, ...], summed over the axis"""
    if axis.size > 1 and dim % x.ndim:
        part_length(x, axis, dim)
        x = torch.cat(x.chunk(axis.size, dim))
    return start_reduce_scatter(x, axis).wait()


def local_slice(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part of `x` along `dim`: a view."""
    part = part_length(x, axis, dim)
    return x.narrow(dim, axis.rank * part, part)


LinearMap = Callable[[Tensor], Tensor]


class _AdjointPair(torch.autograd.Function):
    """A linear map whose backward is its adjoint; as that is a linear map of the same kind, it differentiates again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: LinearMap, adjoint: LinearMap) -> Tensor:
        ctx.pair = forward, adjoint
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        forward, adjoint = ctx.pair
        return _AdjointPair.apply(grads[0], adjoint, forward), None, None


def apply_linear(x: Tensor, forward: LinearMap, adjoint: LinearMap) -> Tensor:
    """forward(x), differentiable by means of its adjoint."""
    return _AdjointPair.apply(x, forward, adjoint)


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), axis)


def _slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return local_slice(x, axis, dim).contiguous()


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Replicated activation enters sharded computation: forward identity, backward all-reduce."""
    if axis.size == 1:
        return x
    return _AdjointPair.apply(x, _identity, partial(_sum, axis=axis))


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Partial sums leave sharded computation: forward all-reduce, backward identity."""
    if axis.size == 1:
        return x
    return _AdjointPair.apply(x, partial(_sum, axis=axis), _identity)


def scatter_to(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Replicated -> this rank's part along `dim`. The backward all-gathers: the parts' gradients make up the whole."""
    if axis.size == 1:
        return x
    return _AdjointPair.apply(x, partial(_slice, axis=axis, dim=dim), partial(all_gather, axis=axis, dim=dim))


def gather_from(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """This rank's part along `dim` -> replicated. The backward slices the gradient, which all ranks have whole."""
    if axis.size == 1:
        return x
    return _AdjointPair.apply(x, partial(all_gather, axis=axis, dim=dim), partial(_slice, axis=axis, dim=dim))


def all_gather_sequence(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sequence-parallel activation enters sharded computation: forward all-gather, backward reduce-scatter."""
    if axis.size == 1:
        return x
    return _AdjointPair.apply(x, partial(all_gather, axis=axis, dim=dim), partial(reduce_scatter, axis=axis, dim=dim))


def reduce_scatter_sequence(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Partial sums leave for a sequence-parallel activation: forward reduce-scatter, backward all-gather."""
    if axis.size == 1:
        return x
    return _AdjointPair.apply(x, partial(reduce_scatter, axis=axis, dim=dim), partial(all_gather, axis=axis, dim=dim))


def swap_blocks(x: Tensor, axis: Axis) -> Tensor:
    """All-to-all: block i of x [size, ...] goes to rank i, block i of the result is from rank i. Backward: the same."""
    if axis.size == 1:
        return x
    swap = partial(_swap, axis=axis)
    return _AdjointPair.apply(x, swap, swap)


def _swap(x: Tensor, axis: Axis) -> Tensor:
    x = x.contiguous()
    assert x.shape[0] == axis.size, f"{x.shape[0]} blocks for {axis.size} ranks"
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x, group=axis.group)
    return result
