"""Linear layers whose collectives run behind their matrix products, under sequence parallelism (--tp-comm-overlap).

A product of an all-gathered tensor is computed in parts, each as soon as its rows have come; what a reduce-scatter adds
up is computed in the order in which ranks want it, each part while the sum before it travels. So none of the four
collectives in a layer's forward is waited for whole, and as many bytes travel as in one go. (Wang et al., "Overlap
Communication with Dependent Computation via Decomposition", ASPLOS 2023.)

In the backward, the gather before a row-parallel layer's product runs in parts. A column-parallel layer's two
collectives there hide whole, the gather behind the product for dX and the reduction behind the one for dW, as in
`LinearFunction`; where a schedule puts dW off, dX is computed in parts and reduced meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import RingExchange, start_all_gather, start_reduce_scatter
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, TPContext
from megatron.core.tensor_parallel.linear_gemms import matrix_of, rows_of
from megatron.core.tensor_parallel.weight_grad import accumulate_weight_grad, add_product_, saved_without_graph


class Overlap(Protocol):
    """Products with a collective at one end. On all ranks of the axis the shapes are the same."""

    def gather_matmul(self, x: Tensor, matrix: Tensor, axis: Axis, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [n, b, i] of each rank, matrix [i, o] -> x of all ranks [n * size, b, i], and that times the matrix, plus
        the bias [o]: [n * size, b, o]."""

    def matmul_scatter(self, x: Tensor, matrix: Tensor, axis: Axis) -> Tensor:
        """x [n * size, b, i], matrix [i, o] -> this rank's part [n, b, o] of the product's sum over the ranks."""


class RingOverlap:
    """The parts go around the ranks, each from its neighbour, by sends and receives (any backend and device).

    Each part is one rank's rows. Before a part is multiplied it is passed on, or while it is the last sum comes in, so
    that a step takes as long as the longer of the two.
    """

    def gather_matmul(self, x: Tensor, matrix: Tensor, axis: Axis, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        whole = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
        parts = whole.chunk(axis.size)
        parts[axis.rank].copy_(x)
        y = x.new_empty(*whole.shape[:-1], matrix.shape[1])
        products = y.chunk(axis.size)
        for step in range(axis.size):
            source = (axis.rank - step) % axis.size
            arriving = None
            if step + 1 < axis.size:
                arriving = RingExchange(parts[source], axis, tag=0, into=parts[source - 1])
            _multiply(parts[source], matrix, bias, products[source])
            if arriving is not None:
                arriving.wait()
        return whole, y

    def matmul_scatter(self, x: Tensor, matrix: Tensor, axis: Axis) -> Tensor:
        parts = x.chunk(axis.size)
        arriving: RingExchange | None = None
        for step in range(axis.size):
            part = parts[(axis.rank - 1 - step) % axis.size].matmul(matrix)
            if arriving is not None:
                part.add_(arriving.wait())
            arriving = RingExchange(part, axis, tag=1) if step + 1 < axis.size else None
        return part


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    rows, flat = x.flatten(0, -2), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, matrix, out=flat)
    else:
        torch.addmm(bias, rows, matrix, out=flat)


class SymmetricOverlap:
    """torch's own pipelines over symmetric memory: GPUs that reach each other's memory (NVLink) under NCCL.

    Copies between GPUs need none of their multiprocessors, which NCCL's sends and receives do.
    """

    @staticmethod
    def operations() -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The fused all-gather and product, and the fused product and reduce-scatter."""
        import torch.distributed._symmetric_memory  # registers them

        ops = torch.ops.symm_mem
        return ops.fused_all_gather_matmul, ops.fused_matmul_reduce_scatter

    def __init__(self) -> None:
        self.fused_gather, self.fused_scatter = self.operations()

    def gather_matmul(self, x: Tensor, matrix: Tensor, axis: Axis, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert axis.group is not None
        whole, (y,) = self.fused_gather(x.contiguous(), [matrix], 0, axis.group.group_name, return_A=True)
        return whole, y if bias is None else y.add_(bias)

    def matmul_scatter(self, x: Tensor, matrix: Tensor, axis: Axis) -> Tensor:
        assert axis.group is not None
        return self.fused_scatter(x, matrix, "sum", 0, axis.group.group_name)


OVERLAPS: dict[str, Callable[[], Overlap]] = {"ring": RingOverlap, "symmetric": SymmetricOverlap}
"""By --tp-comm-overlap-method."""


class _ColumnFunction(torch.autograd.Function):
    """y = gather(x) Wᵀ + bias"""

    # x [s/t, b, h] -> [s, b, f/t]; W [f/t, h]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: OverlappedColumnParallelLinear
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight, ctx.bias_shape = layer, weight, None if bias is None else bias.shape
        flat_bias = None if bias is None else bias.flatten()
        return layer.overlap.gather_matmul(x, matrix_of(weight).t(), layer.axis, flat_bias)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved_without_graph(ctx)
        layer, weight, axis = ctx.layer, ctx.weight, ctx.layer.axis
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        at_once = needs_dw and not layer.queue.defers(weight)
        dx = reducing = dw = None
        gathering = start_all_gather(x, axis) if at_once else None
        if needs_dx and at_once:
            reducing = start_reduce_scatter(dy.matmul(matrix_of(weight)), axis)
        elif needs_dx:
            dx = layer.overlap.matmul_scatter(dy, matrix_of(weight), axis)

        def add_dw_(out: Tensor) -> None:
            whole_x = (start_all_gather(x, axis) if gathering is None else gathering).wait()
            add_product_(matrix_of(out), rows_of(dy), rows_of(whole_x))

        if needs_dw:
            dw = accumulate_weight_grad(weight, add_dw_, layer.queue)
        db = dy.flatten(0, -2).sum(0).view(ctx.bias_shape) if needs_db else None
        return (dx if reducing is None else reducing.wait()), dw, db, None


class _RowFunction(torch.autograd.Function):
    """y = scatter(x Wᵀ) + bias"""

    # x [s, b, f/t] -> [s/t, b, h]; W [h, f/t]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: OverlappedRowParallelLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight = layer, weight
        y = layer.overlap.matmul_scatter(x, matrix_of(weight).t(), layer.axis)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved_without_graph(ctx)
        layer, weight = ctx.layer, ctx.weight
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx = dw = None
        if needs_dx:
            dy, dx = layer.overlap.gather_matmul(grad_output, matrix_of(weight), layer.axis)
        elif needs_dw:
            dy = start_all_gather(grad_output, layer.axis).wait()
        if needs_dw:
            dw = accumulate_weight_grad(
                weight, lambda out: add_product_(matrix_of(out), rows_of(dy), rows_of(x)), layer.queue
            )
        db = grad_output.flatten(0, -2).sum(0) if needs_db else None
        return dx, dw, db, None


class OverlappedColumnParallelLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` with its collectives behind its products, which are in the numbers of the parameters."""

    def __init__(self, name: str, in_size: int, out_dims: tuple[int, ...], ctx: TPContext, **kwargs: Any) -> None:
        assert ctx.fp8 is None, "products in parts are not in fp8"
        super().__init__(name, in_size, out_dims, ctx, **kwargs)
        self.overlap = build_overlap(ctx)

    def forward(self, x: Tensor) -> Tensor:
        """x [s/tp, b, in] -> [s, b, out/tp]"""
        return _ColumnFunction.apply(x, self.weight, self.bias, self)


class OverlappedRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` with its collectives behind its products."""

    def __init__(self, name: str, in_size: int, out_size: int, ctx: TPContext, **kwargs: Any) -> None:
        assert ctx.fp8 is None, "products in parts are not in fp8"
        super().__init__(name, in_size, out_size, ctx, **kwargs)
        self.overlap = build_overlap(ctx)

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, in/tp] -> [s/tp, b, out]"""
        return _RowFunction.apply(x, self.weight, self.bias, self)


def column_parallel(ctx: TPContext) -> type[ColumnParallelLinear]:
    """The class of a transformer layer's column-parallel layers."""
    return OverlappedColumnParallelLinear if _overlaps(ctx) else ColumnParallelLinear


def row_parallel(ctx: TPContext) -> type[RowParallelLinear]:
    """The class of a transformer layer's row-parallel layers."""
    return OverlappedRowParallelLinear if _overlaps(ctx) else RowParallelLinear


def build_overlap(ctx: TPContext) -> Overlap:
    """How the layers of a context overlap."""
    assert ctx.comm_overlap is not None
    return OVERLAPS[ctx.comm_overlap]()


def _overlaps(ctx: TPContext) -> bool:
    return ctx.comm_overlap is not None and ctx.sequence_parallel and ctx.tp.size > 1


def has_symmetric_memory(axis: Axis, device: torch.device) -> bool:
    """Whether the ranks of an axis are GPUs of one node that reach each other's memory, under NCCL."""
    if device.type != "cuda" or axis.group is None or "nccl" not in dist.get_backend(axis.group):
        return False
    if axis.ranks[-1] - axis.ranks[0] >= torch.cuda.device_count():  # they lie on several nodes
        return False
    others = (number for number in range(torch.cuda.device_count()) if number != device.index)
    return all(torch.cuda.can_device_access_peer(device, number) for number in others)
