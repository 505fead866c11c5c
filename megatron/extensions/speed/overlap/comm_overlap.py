"""Overlap of tensor-parallel collectives with GEMMs, under sequence parallelism (--tp-comm-overlap).

A GEMM of an all-gathered input runs in parts, each as soon as its rows arrive. The operand of a reduce-scatter is
computed in the order in which the ranks need it, each part while the previous sum travels. So no collective of a
layer's forward is waited for as a whole, and the bytes sent stay the same. (Wang et al., "Overlap Communication with
Dependent Computation via Decomposition", ASPLOS 2023.)

In the backward, the gather before a row-parallel layer's GEMMs runs in parts. A column-parallel layer needs no parts
there: its gather overlaps with the GEMM for dX and its reduction with the GEMM for dW, as in `LinearFunction`. If the
schedule queues dW, dX is computed and reduced in parts.

Shapes: t ranks; [s, b, h] activations; f features of the sharded dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import RingExchange, start_all_gather, start_reduce_scatter
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ParallelLinear, RowParallelLinear, TPContext
from megatron.core.tensor_parallel.linear_gemms import matrix_of, rows_of
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.tensor_parallel.weight_grad import accumulate_weight_grad, add_product_, saved_without_graph
from megatron.core.torch_private import AutogradContext, load_symmetric_memory
from megatron.extensions.speed.overlap.flags import OverlapFlags
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime


class RingOverlap:
    """GEMMs fused with collectives, by a ring of sends and receives between neighbours, for any backend and device. All
    ranks of the axis call them with the same shapes.

    A part is one rank's rows. While a part is multiplied, it is on its way to the next rank, or the sum so far arrives
    from the previous one. So a step takes as long as the longer of the two.
    """

    def gather_matmul(self, x: Tensor, matrix: Tensor, axis: Axis, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All-gather, then GEMM: x [s/t, b, i], matrix [i, o], bias [o] -> gathered x [s, b, i], product [s, b, o]."""
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
        """GEMM, then reduce-scatter: x [s, b, i], matrix [i, o] -> this rank's part [s/t, b, o] of the summed
        product."""
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
    """The same by torch's symmetric-memory pipelines, for GPUs that access each other's memory (NVLink) under NCCL.

    Their copies between GPUs use no multiprocessors; NCCL's sends and receives do.
    """

    @staticmethod
    def operations() -> tuple[Callable[..., tuple[Tensor, list[Tensor]]], Callable[..., Tensor]]:
        """Returns torch's (all-gather + GEMM, GEMM + reduce-scatter) operations."""
        load_symmetric_memory()
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


OVERLAPS: dict[str, type[RingOverlap | SymmetricOverlap]] = {"ring": RingOverlap, "symmetric": SymmetricOverlap}
"""Choices of --tp-comm-overlap-method."""


class _ColumnContext(AutogradContext):
    layer: Overlapped
    weight: Tensor
    bias_shape: torch.Size
    """Set where there is a bias."""


class _ColumnFunction(torch.autograd.Function):
    """Column-parallel linear layer with overlap: y = gather(x) Wᵀ + bias."""

    # x [s/t, b, h] -> [s, b, f/t]; W [f/t, h]
    @staticmethod
    def forward(ctx: _ColumnContext, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Overlapped) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        ctx.weight = weight
        flat_bias = None
        if bias is not None:
            ctx.bias_shape, flat_bias = bias.shape, bias.flatten()
        return layer.overlap.gather_matmul(x, matrix_of(weight).t(), layer.axis, flat_bias)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: _ColumnContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved_without_graph(ctx)
        layer = ctx.layer
        weight = ctx.weight
        axis = ctx.layer.axis
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        at_once = needs_dw and not layer.queue.defers(weight)
        dx = reducing = dw = None
        gathering = start_all_gather(x, axis) if at_once else None
        if needs_dx and at_once:
            reducing = start_reduce_scatter(dy.matmul(matrix_of(weight)), axis)
        elif needs_dx:
            dx = layer.overlap.matmul_scatter(dy, matrix_of(weight), axis)
        if needs_dw:
            whole_x = lambda: (start_all_gather(x, axis) if gathering is None else gathering).wait()  # noqa: E731
            dw = _weight_grad(layer, weight, dy, whole_x)
        db = dy.flatten(0, -2).sum(0).view(ctx.bias_shape) if needs_db else None
        return (dx if reducing is None else reducing.wait()), dw, db, None


class _RowContext(AutogradContext):
    layer: Overlapped
    weight: Tensor


class _RowFunction(torch.autograd.Function):
    """Row-parallel linear layer with overlap: y = reduce_scatter(x Wᵀ) + bias."""

    # x [s, b, f/t] -> [s/t, b, h]; W [h, f/t]
    @staticmethod
    def forward(ctx: _RowContext, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Overlapped) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight = layer, weight
        y = layer.overlap.matmul_scatter(x, matrix_of(weight).t(), layer.axis)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _RowContext, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved_without_graph(ctx)
        layer, weight = ctx.layer, ctx.weight
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx = dw = None
        if needs_dx:
            dy, dx = layer.overlap.gather_matmul(grad_output, matrix_of(weight), layer.axis)
        elif needs_dw:
            dy = start_all_gather(grad_output, layer.axis).wait()
        if needs_dw:
            dw = _weight_grad(layer, weight, dy, lambda: x)
        db = grad_output.flatten(0, -2).sum(0) if needs_db else None
        return dx, dw, db, None


def _weight_grad(layer: Overlapped, weight: Tensor, dy: Tensor, x: Callable[[], Tensor]) -> Tensor | None:
    """dW = dYᵀ X, now or from the queue, of the input that x() returns."""

    def add_(out: Tensor, overwrite: bool) -> None:
        add_product_(matrix_of(out), rows_of(dy), rows_of(x()), overwrite)

    return accumulate_weight_grad(weight, add_, layer.queue)


class Overlapped(ParallelLinear):
    """A linear layer with overlap, computed by `function`. Its GEMMs run in the precision of the parameters."""

    function: type[torch.autograd.Function]

    def __init__(self, linear: ColumnLinear | RowLinear, ctx: TPContext) -> None:
        assert ctx.format is None, "overlapped GEMMs run in the parameters' format"
        super().__init__(linear, ctx)  # type: ignore[call-arg, arg-type]
        self.overlap = OVERLAPS[ctx.options(OverlapFlags).tp_comm_overlap_method or "ring"]()

    def forward(
        self, x: Tensor, add_bias: bool = True, bias_gradient: bool = True, addend: Tensor | None = None
    ) -> Tensor:
        y: Tensor = self.function.apply(x, self.weight, self.used_bias(add_bias, bias_gradient), self)
        return y


class OverlappedColumnParallelLinear(Overlapped, ColumnParallelLinear):
    """`ColumnParallelLinear` with overlap: x [s/t, b, in] -> [s, b, out/t]; W [out/t, in]."""

    function = _ColumnFunction


class OverlappedRowParallelLinear(Overlapped, RowParallelLinear):
    """`RowParallelLinear` with overlap: x [s, b, in/t] -> [s/t, b, out]; W [out, in/t]."""

    function = _RowFunction


class SymmetricMemory(Callback):
    """Refuses a run whose tensor-parallel ranks have no symmetric memory."""

    def on_setup(self, runtime: Runtime) -> None:
        if not has_symmetric_memory(runtime.state.tp, runtime.device):
            raise ValueError(
                "--tp-comm-overlap-method symmetric needs GPUs of one node, under nccl, that reach each other's "
                f"memory, and those of the tensor-parallel ranks {', '.join(map(str, runtime.state.tp.ranks))} do not; "
                "use ring"
            )


def has_symmetric_memory(axis: Axis, device: torch.device) -> bool:
    """Return whether the ranks of an axis are GPUs of one node that access each other's memory, under NCCL."""
    if device.type != "cuda" or axis.group is None or "nccl" not in dist.get_backend(axis.group):
        return False
    if axis.ranks[-1] - axis.ranks[0] >= torch.cuda.device_count():  # on several nodes
        return False
    others = (number for number in range(torch.cuda.device_count()) if number != device.index)
    return all(torch.cuda.can_device_access_peer(device, number) for number in others)
