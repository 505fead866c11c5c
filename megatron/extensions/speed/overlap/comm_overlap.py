"""Overlap of tensor-parallel collectives with GEMMs, under sequence parallelism (--tp-comm-overlap).

A GEMM with an all-gathered input is split along the sequence into one part per rank. The GEMM of a part starts as soon
as the part's input rows arrive. A GEMM before a reduce-scatter also computes its output in parts, in the order in which
the ranks need the parts. While the partial sum of one part is in flight, the next part is computed. The forward pass of
a layer therefore never waits for a whole collective, and sends the same number of bytes as without overlap. (Wang et
al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023.)

In the backward pass, the gather before a row-parallel layer's GEMMs runs in parts. The backward pass of a
column-parallel layer is not divided into parts. As in `LinearFunction`, the gather overlaps with the GEMM for dX, and
the reduction overlaps with the GEMM for dW. If the schedule defers dW, dX is instead computed and reduced in parts.

Ranks send their parts of the operands in the format that the GEMMs read. With fp8 and one scale per tensor, ranks send
fp8 bytes. The gathered bytes equal the bytes that a cast of the whole tensor in one process would give.

In shapes, t is the number of ranks, [s, b, h] is the shape of activations, and f is the number of features in the
sharded dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import RingExchange, start_all_gather, start_reduce_scatter
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import (
    COLUMN_SEQUENCE,
    ColumnParallelLinear,
    Hardware,
    ParallelLinear,
    RowParallelLinear,
    TPContext,
    enter,
    entered,
)
from megatron.core.tensor_parallel.linear_gemms import LinearGemms, Operand, given_input, matrix_of
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.tensor_parallel.weight_grad import accumulate_weight_grad, saved_without_graph
from megatron.core.torch_private import AutogradContext, load_symmetric_memory
from megatron.extensions.speed.overlap.flags import OverlapFlags
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime


@dataclass(frozen=True)
class Products:
    """Matrix product of a weight W with rows of an activation x or of an output gradient dY. The result is x Wᵀ + bias,
    or dY W. The rows may be cast to fp8."""

    gemms: LinearGemms
    weight: Tensor
    bias: Tensor | None = None
    of_grad: bool = False
    """Whether to compute dY W instead of x Wᵀ + bias."""

    @property
    def matrix(self) -> Tensor:
        """Return the matrix by which the operand is multiplied: Wᵀ [in, out] for x Wᵀ, or W [out, in] for dY W."""
        matrix = matrix_of(self.weight)
        return matrix if self.of_grad else matrix.t()

    def like(self, x: Tensor) -> Tensor:
        """Allocate an uninitialized tensor for the product of x [..., k] and the weight."""
        return x.new_empty(*x.shape[:-1], self.matrix.shape[1], dtype=self.weight.dtype)

    def multiply(self, part: Tensor, scales: Operand, out: Tensor) -> None:
        """Multiply `part` [s/t, b, k] by the weight, and write the product to the contiguous `out`. `scales` contains
        the scales of `part` if it is cast to fp8."""
        rows, flat = (part.flatten(0, -2), *scales), out.view(-1, out.shape[-1])
        if self.of_grad:
            self.gemms.input_grad_rows_(flat, rows, self.weight)
        else:
            self.gemms.forward_rows_(flat, rows, self.weight, self.bias)


@lru_cache(maxsize=8)
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _taking_turns(x: Tensor, count: int, hardware: Hardware) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
    """Yield a function that accepts the index of a loop step and returns the context manager in which the step must
    run. On GPUs, every other step runs on a second stream. While the last tiles of a product leave some multiprocessors
    idle, the first tiles of the next product can therefore use them. The caller must keep all tensors that a step
    creates alive until the loop ends."""
    with hardware.at_one_time(count):
        if not x.is_cuda:
            yield lambda _: nullcontext()
            return
        streams = torch.cuda.current_stream(x.device), _second_stream(x.device)
        streams[1].wait_stream(streams[0])
        yield lambda step: torch.cuda.stream(streams[step % 2])
        streams[0].wait_stream(streams[1])


class RingOverlap:
    """GEMMs that overlap with collectives, implemented as a ring of sends and receives between neighbours, for any
    backend and device. All ranks of the axis must call the methods of this class with the same shapes.

    The sequence is divided into one part for each rank. While a part is multiplied, either this part is sent to the
    next rank (all-gather), or a partial sum arrives from the previous rank (reduce-scatter). Each step of the ring
    takes as long as its matrix product or its transfer, whichever takes longer.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    def gather_matmul(self, x: Operand, products: Products, axis: Axis) -> tuple[Operand, Tensor]:
        """All-gather, then GEMM: x [s/t, b, i] -> gathered x [s, b, i], product [s, b, o]."""
        own, *scales = x
        whole = own.new_empty(axis.size * own.shape[0], *own.shape[1:])
        parts = whole.chunk(axis.size)
        parts[axis.rank].copy_(own)
        y = products.like(whole)
        results = y.chunk(axis.size)
        arriving = None
        with _taking_turns(own, axis.size, self.hardware) as turn:
            for step in range(axis.size):
                source = (axis.rank - step) % axis.size
                with turn(step):
                    if arriving is not None:
                        arriving.wait()
                    if step + 1 < axis.size:
                        arriving = RingExchange(parts[source], axis, tag=0, into=parts[source - 1])
                    products.multiply(parts[source], tuple(scales), results[source])
        return (whole, *scales), y

    def matmul_scatter(self, x: Operand, products: Products, axis: Axis) -> Tensor:
        """GEMM, then reduce-scatter: x [s, b, i] -> this rank's part [s/t, b, o] of the summed product."""
        whole, *scales = x
        parts = whole.chunk(axis.size)
        sums = [products.like(part) for part in parts]
        started: list[RingExchange] = []
        with _taking_turns(whole, axis.size, self.hardware) as turn:
            for step, part in enumerate(sums):
                with turn(step):
                    products.multiply(parts[(axis.rank - 1 - step) % axis.size], tuple(scales), part)
                    if started:
                        part.add_(started[-1].wait())
                    if step + 1 < axis.size:
                        started.append(RingExchange(part, axis, tag=1))
        return sums[-1]


class SymmetricOverlap:
    """GEMMs that overlap with collectives, implemented with torch's symmetric-memory operations, in the precision of
    the parameters. These operations require NCCL, and GPUs that can access each other's memory (NVLink).

    The copies between GPUs use no multiprocessors, in contrast to NCCL's sends and receives.
    """

    @staticmethod
    def operations() -> tuple[Callable[..., tuple[Tensor, list[Tensor]]], Callable[..., Tensor]]:
        """Return torch's two fused operations: all-gather with GEMM, and GEMM with reduce-scatter."""
        load_symmetric_memory()
        ops = torch.ops.symm_mem
        return ops.fused_all_gather_matmul, ops.fused_matmul_reduce_scatter

    def __init__(self, hardware: Hardware) -> None:
        self.fused_gather, self.fused_scatter = self.operations()

    def gather_matmul(self, x: Operand, products: Products, axis: Axis) -> tuple[Operand, Tensor]:
        assert axis.group is not None
        matrix, name = products.matrix, axis.group.group_name
        whole, (y,) = self.fused_gather(x[0].contiguous(), [matrix], 0, name, return_A=True)
        return (whole,), y if products.bias is None else y.add_(products.bias)

    def matmul_scatter(self, x: Operand, products: Products, axis: Axis) -> Tensor:
        assert axis.group is not None
        return self.fused_scatter(x[0], products.matrix, "sum", 0, axis.group.group_name)


OVERLAPS: dict[str, type[RingOverlap | SymmetricOverlap]] = {"ring": RingOverlap, "symmetric": SymmetricOverlap}
"""Choices of --tp-comm-overlap-method."""


class _LayerContext(AutogradContext):
    layer: Overlapped
    weight: Tensor
    bias_shape: torch.Size
    """Shape of the bias. This attribute is not set if the layer has no bias."""


class _ColumnFunction(torch.autograd.Function):
    """Column-parallel linear layer with overlap: y = gather(x) Wᵀ + bias."""

    # x [s/t, b, h] -> [s, b, f/t]; W [f/t, h]
    @staticmethod
    def forward(ctx: _LayerContext, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Overlapped) -> Tensor:
        needs_dw = ctx.needs_input_grad[1]
        local, saved = given_input(x) or layer.gemms.cast_input(x, needs_dw)
        ctx.save_for_backward(*(saved if needs_dw else ()))
        ctx.layer = layer
        ctx.weight = weight
        flat_bias = None
        if bias is not None:
            ctx.bias_shape, flat_bias = bias.shape, bias.flatten()
        return layer.overlap.gather_matmul(local, Products(layer.gemms, weight, flat_bias), layer.axis)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: _LayerContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        x = saved_without_graph(ctx)
        layer = ctx.layer
        weight = ctx.weight
        axis = ctx.layer.axis
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        at_once = needs_dw and not layer.queue.defers(weight)
        dx = reducing = dw = None
        gathering = enter(x, COLUMN_SEQUENCE, axis) if at_once else None
        if needs_dx or needs_dw:
            dy_for_dx, dy_for_dw = layer.gemms.cast_grad(dy, needs_dw)
        if needs_dx and at_once:
            reducing = start_reduce_scatter(layer.gemms.input_grad(dy_for_dx, weight), axis)
        elif needs_dx:
            dx = layer.overlap.matmul_scatter(dy_for_dx, Products(layer.gemms, weight, of_grad=True), axis)
        if needs_dw:
            whole_x = lambda: entered(enter(x, COLUMN_SEQUENCE, axis) if gathering is None else gathering)  # noqa: E731
            dw = _weight_grad(layer, weight, dy_for_dw, whole_x)
        db = dy.flatten(0, -2).sum(0).view(ctx.bias_shape) if needs_db else None
        return (dx if reducing is None else reducing.wait()), dw, db, None


class _RowFunction(torch.autograd.Function):
    """Row-parallel linear layer with overlap: y = reduce_scatter(x Wᵀ) + bias."""

    # x [s, b, f/t] -> [s/t, b, h]; W [h, f/t]
    @staticmethod
    def forward(ctx: _LayerContext, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Overlapped) -> Tensor:
        needs_dw = ctx.needs_input_grad[1]
        whole, saved = given_input(x) or layer.gemms.cast_input(x, needs_dw)
        ctx.save_for_backward(*(saved if needs_dw else ()))
        ctx.layer, ctx.weight = layer, weight
        y = layer.overlap.matmul_scatter(whole, Products(layer.gemms, weight), layer.axis)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LayerContext, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x = saved_without_graph(ctx)
        layer, weight = ctx.layer, ctx.weight
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx = dw = None
        if needs_dx or needs_dw:
            local = layer.gemms.cast_grad_to_gather(grad_output)
        if needs_dx:
            dy, dx = layer.overlap.gather_matmul(local, Products(layer.gemms, weight, of_grad=True), layer.axis)
        elif needs_dw:
            dy = start_all_gather(local[0], layer.axis).wait(), *local[1:]
        if needs_dw:
            dw = _weight_grad(layer, weight, layer.gemms.gathered_grad(dy), lambda: x)
        db = grad_output.flatten(0, -2).sum(0) if needs_db else None
        return dx, dw, db, None


def _weight_grad(layer: Overlapped, weight: Tensor, dy: Operand, x: Callable[[], Operand]) -> Tensor | None:
    """Compute the weight gradient dW = dYᵀ X now, or queue this computation if the schedule defers dW. The function `x`
    returns the input X."""

    def add_(out: Tensor, overwrite: bool) -> None:
        layer.gemms.add_weight_grad_(matrix_of(out), dy, x(), overwrite)

    return accumulate_weight_grad(weight, add_, layer.queue)


class Overlapped(ParallelLinear):
    """Parallel linear layer whose collectives overlap with its GEMMs. `function` is the autograd function that computes
    the layer."""

    function: type[torch.autograd.Function]

    def __init__(self, linear: ColumnLinear | RowLinear, ctx: TPContext) -> None:
        super().__init__(linear, ctx)  # type: ignore[call-arg, arg-type]
        assert self.gemms.splits_tokens, "each part of the tokens must be cast with the scale of all tokens"
        self.overlap = OVERLAPS[ctx.options(OverlapFlags).tp_comm_overlap_method or "ring"](ctx.hardware)

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
    """Callback that refuses to start a run whose tensor-parallel ranks do not support symmetric memory."""

    def on_setup(self, runtime: Runtime) -> None:
        if not has_symmetric_memory(runtime.state.tp, runtime.device):
            raise ValueError(
                "--tp-comm-overlap-method symmetric needs the nccl backend, and GPUs of one node that can access each "
                f"other's memory, but tensor-parallel ranks {', '.join(map(str, runtime.state.tp.ranks))} lack these; "
                "use ring"
            )


def has_symmetric_memory(axis: Axis, device: torch.device) -> bool:
    """Return True if the ranks of an axis use NCCL on GPUs of one node that can access each other's memory."""
    if device.type != "cuda" or axis.group is None or "nccl" not in dist.get_backend(axis.group):
        return False
    if axis.ranks[-1] - axis.ranks[0] >= torch.cuda.device_count():  # on several nodes
        return False
    others = (number for number in range(torch.cuda.device_count()) if number != device.index)
    return all(torch.cuda.can_device_access_peer(device, number) for number in others)
