"""Collectives along one mesh axis, put on their way now and waited for later, so that a product can run meanwhile.

On an axis of size 1 all of them return their input and touch no process group.

On CPU a reduce-scatter is an all-to-all and a sum on the rank that keeps it: gloo's own takes longer for the same
bytes, (t-1)/t of the operand. So are all-reduces between two ranks that are bound by the number of
messages and not by bytes: both send what they have and add, one message in place of two. The order of the terms is
that of the ranks.
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
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

EXCHANGED_BYTES = 2**20
"""All-reduces of up to so many bytes between two ranks on CPU are one exchange."""


class Pending:
    """The result of a collective that may still be under way. It keeps the operands alive until waited for."""

    def __init__(
        self,
        result: Tensor,
        work: dist.Work | None = None,
        operand: Tensor | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._result, self._work, self._operand, self._finish = result, work, operand, finish

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            if self._finish is not None:
                self._finish()
            self._work = self._operand = self._finish = None
        return self._result


Start = Callable[[Tensor, Axis], Pending]


def start_nothing(x: Tensor, axis: Axis) -> Pending:
    """No collective: the other half of a pair whose one half needs none."""
    return Pending(x)


def start_all_reduce_(x: Tensor, axis: Axis) -> Pending:
    """Sums the contiguous `x` over the axis, in place."""
    if axis.size == 1:
        return Pending(x)
    if x.is_cpu and axis.size == 2 and x.numel() * x.element_size() <= EXCHANGED_BYTES:
        return _exchanged(torch.stack([x, x]), x, axis)
    return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True))


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """x [n, ...] -> [n * size, ...], `out` if given: the ranks' parts in their order on dim 0."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    result = x.new_empty(axis.size * x.shape[0], *x.shape[1:]) if out is None else out
    work = getattr(dist, ALL_GATHER)(result, x, group=axis.group, async_op=True)
    return Pending(result, work, x)


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """x [n * size, ...] -> [n, ...], `out` if given: this rank's part of the sum over the axis.

    `out` may be that part of x itself. What else is in x remains.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    part = part_length(x, axis, 0)
    result = x.new_empty(part, *x.shape[1:]) if out is None else out
    if x.is_cpu:
        return _exchanged(x.view(axis.size, part, *x.shape[1:]), result, axis)
    work = getattr(dist, REDUCE_SCATTER)(result, x, group=axis.group, async_op=True)
    return Pending(result, work, x)


def _exchanged(blocks: Tensor, result: Tensor, axis: Axis) -> Pending:
    """Block i of [size, ...] goes to rank i, which sums what it gets into `result`."""
    received = torch.empty_like(blocks)
    work = dist.all_to_all_single(received, blocks, group=axis.group, async_op=True)
    return Pending(result, work, blocks, partial(torch.sum, received, 0, dtype=result.dtype, out=result))


def part_length(x: Tensor, axis: Axis, dim: int) -> int:
    """Of this rank's part of `x` along `dim`."""
    length = x.shape[dim]
    assert length % axis.size == 0, f"dim {dim} of {tuple(x.shape)} does not divide over {axis.size} ranks"
    return length // axis.size


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


class Passing:
    """A tensor on its way to the next rank, and the previous rank's, of the same shape, on its way here: `into` a
    contiguous tensor where one is given.

    All ranks pass tensors on in one order. gloo takes no CUDA tensors point to point: these go through host memory.
    """

    def __init__(self, x: Tensor, axis: Axis, tag: int, into: Tensor | None = None) -> None:
        self._device, self._into = x.device, into
        through_host = x.is_cuda and dist.get_backend(axis.group) == "gloo"
        self._operand = x.to("cpu") if through_host else x.contiguous()
        self._result = torch.empty_like(self._operand) if into is None or through_host else into
        following, previous = (axis.ranks[(axis.rank + by) % axis.size] for by in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._operand, following, group=axis.group, tag=tag),
                dist.P2POp(dist.irecv, self._result, previous, group=axis.group, tag=tag),
            ]
        )

    def wait(self) -> Tensor:
        """What came from the previous rank. The tensor that went may be changed or dropped afterwards."""
        for work in self._works:
            work.wait()
        if self._into is None:
            return self._result.to(self._device)
        return self._into if self._result is self._into else self._into.copy_(self._result)
