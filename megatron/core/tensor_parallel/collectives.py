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
