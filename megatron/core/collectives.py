"""Collectives along one axis of the mesh, in three forms.

- `start_*` functions launch a collective and return a `Pending`, whose `wait()` completes the collective. A GEMM can
  overlap with the collective.
- `all_reduce_`, `all_gather` and `reduce_scatter` wait for the result. The functions from `copy_to` to `swap_blocks`
  are differentiable collectives for activations. Each of these functions is a linear map, whose backward pass is the
  adjoint map.
- `RingExchange` sends to the next rank and receives from the previous one.

On an axis of size 1, all functions return their input and use no process group. `RingExchange` has no such shortcut. In
shapes, t is the size of the axis.

On CPU, a reduce-scatter is an all-to-all followed by a local sum, because gloo's reduce-scatter is slower. Either way,
each rank sends (t-1)/t of the operand. In a small all-reduce between two ranks, the ranks exchange their operands and
each rank adds them. An exchange needs one message in each direction, whereas gloo's all-reduce needs two. The
all-to-all with a local sum and the exchange of operands both add the terms in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.torch_private import AutogradContext

T = TypeVar("T")

# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor. The constants are strings, so that each call
# looks the function up in torch.distributed.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

EXCHANGED_BYTES = 2**20
"""Largest operand, in bytes, for which an all-reduce between two CPU ranks exchanges the operands in one message."""


@dataclass(eq=False)
class Pending:
    """Handle for the result of a collective in flight. The handle keeps the operands of the collective alive until
    `wait()` returns."""

    result: Tensor
    work: dist.Work | None = None
    operand: Tensor | None = None
    finish: Callable[[], object] | None = None

    def wait(self) -> Tensor:
        """Complete the collective and return its result. If `wait` is called again, it returns the same result."""
        if self.work is not None:
            self.work.wait()
            if self.finish is not None:
                self.finish()
            self.work = self.operand = self.finish = None
        return self.result


class PassPair:
    """Two passes of different micro-batches on one rank. `PassPair` runs one pass after the other. A subclass may
    interleave the passes."""

    in_turns = False

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both passes."""
        first()
        second()

    def hand_over(self) -> None:
        """Let the other pass compute while a collective of this pass is in flight. Call this method after launching the
        collective and before its `wait()`."""


Start = Callable[[Tensor, Axis], Pending]


def start_nothing(x: Tensor, axis: Axis) -> Pending:
    """Return `x` without launching a collective, for a layer boundary that communicates only in the other direction."""
    return Pending(x)


def start_all_reduce_(x: Tensor, axis: Axis) -> Pending:
    """Launch an in-place sum of the contiguous `x` over the axis."""
    if axis.size == 1:
        return Pending(x)
    if x.is_cpu and axis.exchanges_sums and axis.size == 2 and x.numel() * x.element_size() <= EXCHANGED_BYTES:
        return _exchanged(torch.stack([x, x]), x, axis)
    return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True))


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Launch an all-gather along dim 0, in rank order: x [n, ...] -> [t * n, ...]. The result is written to `out` if
    given."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    result = x.new_empty(axis.size * x.shape[0], *x.shape[1:]) if out is None else out
    work = getattr(dist, ALL_GATHER)(result, x, group=axis.group, async_op=True)
    return Pending(result, work, x)


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Launch a reduce-scatter (sum) along dim 0: x [t * n, ...] -> [n, ...]. The result is written to `out` if given.

    `out` may be the view of `x` that contains this rank's part. The rest of `x` does not change.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    part = part_length(x, axis, 0)
    result = x.new_empty(part, *x.shape[1:]) if out is None else out
    if x.is_cpu and axis.exchanges_sums:
        return _exchanged(x.view(axis.size, part, *x.shape[1:]), result, axis)
    work = getattr(dist, REDUCE_SCATTER)(result, x, group=axis.group, async_op=True)
    return Pending(result, work, x)


def start_all_to_all(x: Tensor, outgoing: list[int], incoming: list[int], axis: Axis) -> Pending:
    """Launch an all-to-all, in rank order: x [sum(outgoing), ...] -> [sum(incoming), ...].

    This rank sends outgoing[i] rows to rank i, and receives incoming[i] rows from rank i.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    result = x.new_empty(sum(incoming), *x.shape[1:])
    return Pending(result, dist.all_to_all_single(result, x, incoming, outgoing, group=axis.group, async_op=True), x)


def _exchanged(blocks: Tensor, result: Tensor, axis: Axis) -> Pending:
    """Send block i of blocks [t, ...] to rank i, and sum the received blocks into `result`."""
    received = torch.empty_like(blocks)
    work = dist.all_to_all_single(received, blocks, group=axis.group, async_op=True)
    return Pending(result, work, blocks, partial(torch.sum, received, 0, dtype=result.dtype, out=result))


def part_length(x: Tensor, axis: Axis, dim: int) -> int:
    """Return the length of one rank's part of `x` along `dim`."""
    length = x.shape[dim]
    assert length % axis.size == 0, f"dim {dim} of {tuple(x.shape)} does not divide over {axis.size} ranks"
    return length // axis.size


def all_reduce_(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce the contiguous `x` over the axis, in place."""
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate the ranks' tensors along `dim`: x [..., n, ...] -> [..., t * n, ...]."""
    gathered = start_all_gather(x, axis).wait()
    if axis.size == 1 or dim % x.ndim == 0:
        return gathered
    return torch.cat(gathered.chunk(axis.size), dim)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis and keep this rank's part of dim 0: x [t * n, ...] -> [n, ...]."""
    return start_reduce_scatter(x, axis).wait()


def gather_objects(value: T, axis: Axis) -> list[T]:
    """All-gather a Python object from each rank. The function returns the objects of all ranks, in rank order."""
    if axis.size == 1:
        return [value]
    values = [value] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


def local_slice(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return a view of this rank's part of `dim`: x [..., t * n, ...] -> [..., n, ...]."""
    if axis.size == 1:
        return x
    part = part_length(x, axis, dim)
    return x.narrow(dim, axis.rank * part, part)


LinearMap = Callable[[Tensor], Tensor]


LinearMaps = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class PairContext(AutogradContext):
    pair: tuple[LinearMaps, LinearMaps]


class _AdjointPair(torch.autograd.Function):
    """Autograd function for a map that is linear in each of several tensors. The backward pass applies the adjoint map
    to the gradients.

    Gradients can be differentiated again, because the adjoint's own backward pass is the original map.
    """

    @staticmethod
    def forward(ctx: PairContext, forward: LinearMaps, adjoint: LinearMaps, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.pair = forward, adjoint
        return tuple(forward(tensors))

    @staticmethod
    def backward(ctx: PairContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forward, adjoint = ctx.pair
        return None, None, *_AdjointPair.apply(adjoint, forward, *grads)


def apply_linear_together(tensors: Sequence[Tensor], forward: LinearMaps, adjoint: LinearMaps) -> tuple[Tensor, ...]:
    """Return forward(tensors), and apply `adjoint` to the gradients in the backward pass. `forward` must be linear in
    each tensor."""
    return _AdjointPair.apply(forward, adjoint, *tensors)


def apply_linear(x: Tensor, forward: LinearMap, adjoint: LinearMap) -> Tensor:
    """Return forward(x), and apply `adjoint` to the gradient in the backward pass. `forward` must be linear."""
    return apply_linear_together((x,), lambda xs: [forward(xs[0])], lambda ys: [adjoint(ys[0])])[0]


def _pair(x: Tensor, axis: Axis, forward: Callable[..., Tensor], adjoint: Callable[..., Tensor], *dim: int) -> Tensor:
    if axis.size == 1:
        return x
    return apply_linear(x, lambda x: forward(x, axis, *dim), lambda x: adjoint(x, axis, *dim))


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), axis)


def _slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return local_slice(x, axis, dim).contiguous()


def _swap(x: Tensor, axis: Axis) -> Tensor:
    x = x.contiguous()
    assert x.shape[0] == axis.size, f"{x.shape[0]} blocks for {axis.size} ranks"
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x, group=axis.group)
    return result


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Pass a replicated activation to a sharded computation: identity in the forward pass, all-reduce in the backward
    pass."""
    return _pair(x, axis, _identity, _all_reduce)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Reduce partial sums from a sharded computation: all-reduce in the forward pass, identity in the backward pass."""
    return _pair(x, axis, _all_reduce, _identity)


def gather_from(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Gather the ranks' parts along `dim` into a replicated tensor. In the backward pass, every rank has the whole
    gradient and takes its own slice."""
    return _pair(x, axis, all_gather, _slice, dim)


def all_gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Pass a sequence-parallel activation to a sharded computation: all-gather in the forward pass, reduce-scatter in
    the backward pass."""
    return _pair(x, axis, all_gather, reduce_scatter)


def swap_blocks(x: Tensor, axis: Axis) -> Tensor:
    """All-to-all: send block i of x [t, ...] to rank i, and receive block i of the result from rank i. The backward
    pass exchanges the gradient in the same way."""
    return _pair(x, axis, _swap, _swap)


def features_to_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Change the sharding from features to sequence with an all-to-all: x [s, ..., f/t] -> [s/t, ..., f]."""
    if axis.size == 1:
        return x
    blocks = x.unflatten(0, (axis.size, part_length(x, axis, 0)))
    return swap_blocks(blocks, axis).movedim(0, -2).flatten(-2)


class RingExchange:
    """One ring step: send `x` to the next rank, and receive a tensor of the same shape from the previous rank.

    If `into` is given, the received tensor is written to this contiguous tensor. All ranks must start their exchanges
    in the same order. gloo cannot send CUDA tensors point to point, so CUDA tensors are copied through host memory.
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
        """Return the tensor from the previous rank. After this call, the sent tensor may be modified or freed."""
        for work in self._works:
            work.wait()
        if self._into is None:
            return self._result.to(self._device)
        return self._into if self._result is self._into else self._into.copy_(self._result)
