"""Collectives along one mesh axis, and the pairs of them that autograd needs.

Three layers, each built on the one above:

- `start_*` put a collective on its way and return a `Pending`, so that a matrix multiplication can run meanwhile;
- `all_reduce_`, `all_gather`, `reduce_scatter` wait for it;
- `copy_to`, `reduce_from`, ... are differentiable. Each is one of a pair of adjoint linear maps, so its backward is the
  other one: identity with all-reduce, slice with all-gather, all-gather with reduce-scatter.

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

# torch 2.13 gave these two collectives new names; both are looked up when called.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Pending:
    """The result of a collective that may still be under way. It keeps the operand alive until waited for."""

    def __init__(self, result: Tensor, work: dist.Work | None = None, operand: Tensor | None = None) -> None:
        self._result, self._work, self._operand = result, work, operand

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._operand = None
        return self._result


Start = Callable[[Tensor, Axis], Pending]


def start_nothing(x: Tensor, axis: Axis) -> Pending:
    """No collective: the other half of a pair whose one half needs none."""
    return Pending(x)


def start_all_reduce_(x: Tensor, axis: Axis) -> Pending:
    """Sums the contiguous `x` over the axis, in place."""
    if axis.size == 1:
        return Pending(x)
    return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True))


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """x [n, ...] -> [n * size, ...]: the ranks' parts in their order on dim 0."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    result = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    work = getattr(dist, _ALL_GATHER)(result, x, group=axis.group, async_op=True)
    return Pending(result, work, x)


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """x [n * size, ...] -> [n, ...]: this rank's part of the sum over the axis."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    result = x.new_empty(_part(x, axis, 0), *x.shape[1:])
    work = getattr(dist, _REDUCE_SCATTER)(result, x, group=axis.group, async_op=True)
    return Pending(result, work, x)


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
        _part(x, axis, dim)
        x = torch.cat(x.chunk(axis.size, dim))
    return start_reduce_scatter(x, axis).wait()


def local_slice(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part of `x` along `dim`: a view."""
    part = _part(x, axis, dim)
    return x.narrow(dim, axis.rank * part, part)


def _part(x: Tensor, axis: Axis, dim: int) -> int:
    length = x.shape[dim]
    assert length % axis.size == 0, f"dim {dim} of {tuple(x.shape)} does not divide over {axis.size} ranks"
    return length // axis.size


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
