"""Tensor-parallel linear layers (column-parallel, row-parallel and vocabulary-parallel), with sequence parallelism.

A column-parallel layer shards the output features, and a row-parallel layer shards the input features. A
column-parallel layer followed by a row-parallel layer needs one collective at each end (arXiv 1909.08053, section 3).
With sequence parallelism, the activations outside of such pairs are sharded along the sequence, so a pair begins with
an all-gather and ends with a reduce-scatter instead of an all-reduce (arXiv 2205.05198, section 4.2).

All linear layers of the model use `LinearFunction`. In shapes, t is the number of tensor-parallel ranks. Activations
have the shape [s, b, h], or [s/t, b, h] under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.attention.backends import ATTENTION_BACKENDS, AttentionBackend, AttentionOperands
from megatron.core.collectives import (
    PassPair,
    Pending,
    Start,
    start_all_gather,
    start_all_reduce_,
    start_nothing,
    start_reduce_scatter,
)
from megatron.core.config.flag_spec import Section
from megatron.core.init import free_storage
from megatron.core.kernels import kernel_for
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.param_meta import Init, InitPolicy, ParamMeta, Role
from megatron.core.tensor_parallel.linear_gemms import (
    PLAIN,
    Cuts,
    LinearFormat,
    LinearGemms,
    Operand,
    OutputGradient,
    attach,
    given_input,
    matrix_of,
)
from megatron.core.tensor_parallel.linear_spec import LINEARS, ColumnLinear, ReplicatedLinear, RowLinear
from megatron.core.tensor_parallel.weight_grad import (
    WeightGradQueue,
    accumulate_weight_grad,
    saved_without_graph,
)
from megatron.core.torch_private import AutogradContext, assert_async, is_hooked

T = TypeVar("T")


@dataclass(frozen=True)
class Hardware:
    """Capabilities of the device that holds the tensors. Layers read these capabilities from their `TPContext`. In a
    dry run, a `Hardware` object describes a device on which the model does not run.
    """

    compiled: bool = False
    """True if torch.compile compiles element-wise functions (`megatron.core.compiled_regions`)."""

    def host_waits_for(self, x: Tensor) -> bool:
        """Return whether reading `x` makes the host wait for the device."""
        return x.is_cuda

    def attention(self, backend: str, operands: AttentionOperands) -> AttentionBackend:
        """Return the attention kernels that --attention-backend selects for one layer."""
        made: AttentionBackend = ATTENTION_BACKENDS.build(backend, operands)
        return made

    def each(self, parts: Sequence[T]) -> Iterable[T]:
        """Iterate over `parts`, the chunks of a sequence, in a loop whose iterations do equal work. Memory planning
        runs only some iterations, so a tensor that an iteration creates must not be used after the iteration."""
        return parts

    def at_one_time(self, count: int) -> AbstractContextManager[None]:
        """Return a context manager for `count` independent GEMMs of equal shape, which may run concurrently."""
        return nullcontext()


HARDWARE = Hardware()
"""Default capabilities, without compilation."""


@dataclass(frozen=True)
class TPContext(Section):
    """Groups, dtype, device and options that are common to all layers of a model, including the layers of
    extensions."""

    state: ParallelState
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    queue: WeightGradQueue
    cp_comm_type: str = "p2p"
    hardware: Hardware = field(default_factory=Hardware)
    """Capabilities of the device, including whether torch.compile is used."""

    attention_backend: str = "auto"
    """Attention backend (--attention-backend, or the result of `backend_choice`). "auto" lets torch select one."""

    format: LinearFormat | None = None
    """Number format in which linear layers compute their GEMMs, or None if they compute in `dtype`."""

    pair: PassPair = field(default_factory=PassPair)
    """`PassPair` that interleaves two passes, so that one pass computes while the other pass communicates."""

    seed: int = 1234
    """Seed of the run. Dropout masks depend on the seed and on the name of the dropout module."""

    lazy: bool = False
    """True if parameters are created without storage. `DistributedDataParallel` allocates their storage later."""

    initial: InitPolicy = field(default_factory=InitPolicy)
    """Policy that determines the initial values of each parameter from its role."""

    layer: int = 0
    """Number of the transformer layer to which the module that is being built belongs."""

    @property
    def tp(self) -> Axis:
        return self.state.tp

    @property
    def compiled(self) -> bool:
        """True if torch.compile compiles element-wise functions."""
        return self.hardware.compiled

    def of_layer(self, number: int) -> TPContext:
        """Return the context for layer `number`; its `format` is None if the layer does not use the number format."""
        used = self.format is not None and number in self.format.layers
        return replace(self, layer=number, format=self.format if used else None)


@dataclass(frozen=True)
class Boundary:
    """Collectives before and after a layer f, y = leave(f(enter(x))), and their adjoints for the backward pass.

    The adjoint collectives (`enter_adjoint` and `leave_adjoint`) may overwrite their input.
    """

    enter: Start = start_nothing
    enter_adjoint: Start = start_nothing
    leave: Start = start_nothing
    leave_adjoint: Start = start_nothing

    cuts: Cuts = field(default_factory=Cuts)


LOCAL = Boundary()
LOCAL_SEQUENCE = Boundary(cuts=Cuts(tokens=True))
COLUMN = Boundary(enter_adjoint=start_all_reduce_, cuts=Cuts(outputs=True))
COLUMN_SEQUENCE = Boundary(
    enter=start_all_gather, enter_adjoint=start_reduce_scatter, cuts=Cuts(sequence=True, outputs=True)
)
ROW = Boundary(leave=start_all_reduce_, cuts=Cuts(inputs=True))
ROW_SEQUENCE = Boundary(leave=start_reduce_scatter, leave_adjoint=start_all_gather, cuts=Cuts(inputs=True))


def column_boundary(ctx: TPContext) -> Boundary:
    """Return the collectives of a column-parallel layer: x [s, b, h] or [s/t, b, h] -> y [s, b, f/t]."""
    if ctx.tp.size == 1:
        return LOCAL
    return COLUMN_SEQUENCE if ctx.sequence_parallel else COLUMN


def row_boundary(ctx: TPContext) -> Boundary:
    """Return the collectives of a row-parallel layer: x [s, b, f/t] -> y [s, b, h] or [s/t, b, h]."""
    if ctx.tp.size == 1:
        return LOCAL
    return ROW_SEQUENCE if ctx.sequence_parallel else ROW


def make_parameter(meta: ParamMeta, ctx: TPContext) -> nn.Parameter:
    """Create this rank's shard of a parameter, uninitialized. Fields that `meta` does not set are taken from
    `ctx.initial`. `initialize_parameters_` later sets the values of the shard."""
    meta = ctx.initial.complete(meta)
    _, shape = meta.box(ctx.state.coords)
    parameter = nn.Parameter(torch.empty(shape, dtype=ctx.dtype, device=ctx.device))
    parameter.meta = meta  # type: ignore[attr-defined]
    if ctx.lazy:
        free_storage(parameter)
    return parameter


def make_sharded_parameter(
    name: str, shape: tuple[int, ...], ctx: TPContext, *, role: Role, init: Init | None = None, stacked: int = 0
) -> nn.Parameter:
    """Create a parameter that is sharded along dim 0 over the tensor-parallel ranks.

    Args:
        name: Name of the parameter.
        shape: Shape of the whole, unsharded parameter.
        ctx: Context of the layer that contains the parameter.
        role: Role that determines initial values and optimizer settings.
        init: Initial values. None means the initial values that belong to `role`.
        stacked: Number of leading dims that stack matrices, as in `ParamMeta.stacked`.
    """
    return make_parameter(ParamMeta(name, shape, {"tp": 0}, init, role=role, stacked=stacked), ctx)


class LinearContext(AutogradContext):
    weight: Tensor
    boundary: Boundary
    axis: Axis
    queue: WeightGradQueue
    gemms: LinearGemms
    of_output: OutputGradient | None
    bias_shape: torch.Size
    """Shape of the bias. Not set if the layer has no bias."""


class LinearFunction(torch.autograd.Function):
    """Autograd function of a linear layer with its collectives: y = leave(enter(x) Wᵀ) + bias. The weight W [..., in]
    is viewed as a matrix [out, in].

    If an addend is given, the result is y + addend, and `leave` must not be a collective. For the backward pass, the
    function saves only the input before `enter`, in the form that the dW GEMM reads. If `saves` is False, nothing is
    saved. The backward pass gathers the input again while it computes dX, and reduces dX while it computes dW.
    `backward` passes dW to `accumulate_weight_grad`. If another kernel has already cast dY or summed it over tokens,
    `of_output` provides the results.
    """

    # Column parallel: x [s, b, h] -> y [s, b, f/t]; W [f/t, h]. With sequence parallelism, x is [s/t, b, h].
    # Row parallel: x [s, b, f/t] -> y [s, b, h]; W [h, f/t]. With sequence parallelism, y is [s/t, b, h].
    @staticmethod
    def forward(
        ctx: LinearContext,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        boundary: Boundary,
        axis: Axis,
        queue: WeightGradQueue,
        gemms: LinearGemms = PLAIN,
        saves: bool = True,
        of_output: OutputGradient | None = None,
        addend: Tensor | None = None,
    ) -> Tensor:
        needs_dw = saves and ctx.needs_input_grad[1]
        local, saved = given_input(x) or gemms.cast_input(x, needs_dw)
        ctx.save_for_backward(*(saved if needs_dw else ()))
        # The parameter is not stored with save_for_backward, because activation checkpointing returns saved tensors
        # without their Python attributes.
        ctx.weight = weight
        ctx.boundary = boundary
        ctx.axis = axis
        ctx.queue = queue
        ctx.gemms = gemms
        ctx.of_output = of_output
        del saved  # so that only autograd keeps the tensors in memory
        full_x = entered(enter(local, boundary, axis))
        flat_bias = None
        if bias is not None:
            ctx.bias_shape, flat_bias = bias.shape, bias.flatten()
        if boundary.leave is start_nothing:
            return gemms.forward(full_x, weight, flat_bias, addend)
        assert addend is None, "an addend is not supported if a collective reduces the output"
        y = boundary.leave(gemms.forward(full_x, weight, None), axis).wait()
        return y if flat_bias is None else y.add_(flat_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: LinearContext, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x = saved_without_graph(ctx)
        weight = ctx.weight
        boundary = ctx.boundary
        axis = ctx.axis
        gemms = ctx.gemms
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]

        gathering = enter(x, boundary, axis) if needs_dw and not ctx.queue.defers(weight) else None
        dx = dw = None
        given, of_bias = (None, None) if ctx.of_output is None else ctx.of_output.take(grad_output)
        if needs_dx or needs_dw:
            dy_for_dx, dy = given or gemms.cast_grad(boundary.leave_adjoint(grad_output, axis).wait(), needs_dw)
            del given
        if needs_dx:
            dx = boundary.enter_adjoint(gemms.input_grad(dy_for_dx, weight), axis)
            del dy_for_dx

        def add_dw_(out: Tensor, overwrite: bool) -> None:
            full_x = entered(enter(x, boundary, axis) if gathering is None else gathering)
            gemms.add_weight_grad_(matrix_of(out), dy, full_x, overwrite)

        if needs_dw:
            dw = accumulate_weight_grad(weight, add_dw_, ctx.queue)
        if needs_db and of_bias is None:
            of_bias = grad_output.flatten(0, -2).sum(0)
        db = of_bias.view(ctx.bias_shape) if of_bias is not None and needs_db else None
        of_addend = grad_output if ctx.needs_input_grad[-1] else None
        return (None if dx is None else dx.wait()), dw, db, *[None] * 6, of_addend


def enter(x: Operand, boundary: Boundary, axis: Axis) -> list[Pending]:
    """Start `boundary.enter` for all tensors of `x` except scalars. A scalar applies to the whole sequence."""
    return [(boundary.enter if part.ndim else start_nothing)(part, axis) for part in x]


def entered(started: list[Pending]) -> Operand:
    return tuple(part.wait() for part in started)


class ParallelLinear(nn.Module):
    """Linear layer y = x Wᵀ + bias. `metas` describes the parameters, and `boundary` contains the collectives."""

    def __init__(self, name: str, metas: list[ParamMeta], boundary: Boundary, ctx: TPContext) -> None:
        super().__init__()
        weight, *bias = (make_parameter(meta, ctx) for meta in metas)
        self.weight, self.bias = weight, bias[0] if bias else None
        self.axis = ctx.tp
        self.queue = ctx.queue
        self.boundary = boundary
        self.compiled = ctx.compiled
        of_layer = ctx.tp, boundary.cuts, ctx.device, ctx.compiled
        self.gemms = PLAIN if ctx.format is None else ctx.format.linear(name, *of_layer)

    def forward(
        self, x: Tensor, add_bias: bool = True, bias_gradient: bool = True, addend: Tensor | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: Input.
            add_bias: False if a compiled function after the layer adds the bias.
            bias_gradient: False if the backward pass of a compiled function computes the bias gradient.
            addend: Tensor [s, b, out] that is added to the output. Pass it only if `takes_addend()` returns True.
        """
        saves, bias = torch.is_grad_enabled(), self.used_bias(add_bias, bias_gradient)
        of_output = self.output_gradient(bias) if saves and self.compiled else None
        settings = self.boundary, self.axis, self.queue, self.gemms, saves, of_output
        return attach(LinearFunction.apply(x, self.weight, bias, *settings, addend), of_output)

    def output_gradient(self, bias: Tensor | None) -> OutputGradient | None:
        """Return the object with which the layer requests casts and sums of dY from the operation that computes dY.

        Return None if the layer needs neither casts nor sums, if dY must be gathered first, or if hooks are registered.
        """
        sums = bias is not None and bias.requires_grad
        makes = sums or self.gemms.grad_casts is not None
        if not makes or self.boundary.leave_adjoint is not start_nothing or observed(self):
            return None
        return OutputGradient(self.gemms, self.weight.requires_grad, sums)

    def used_bias(self, add_bias: bool, bias_gradient: bool) -> Tensor | None:
        """Return the bias that `forward` adds to the output, or None if `forward` adds no bias."""
        if self.bias is None or not add_bias:
            return None
        return self.bias if bias_gradient else self.bias.detach()


class ColumnParallelLinear(ParallelLinear):
    """Linear layer with sharded output features: y = x Wᵀ + bias. The weight of a gated MLP is [2, ffn, h], sharded
    along dim 1, so that each shard contains rows of both projections. The output has one feature dim."""

    # Shapes in `forward`: x [s, b, in], or [s/t, b, in] under sequence parallelism -> y [s, b, out/t]; W [out/t, in].
    def __init__(self, linear: ColumnLinear, ctx: TPContext) -> None:
        super().__init__(linear.name, linear.metas(), column_boundary(ctx), ctx)


def observed(*modules: nn.Module) -> bool:
    """Return whether forward or backward hooks are registered on these modules."""
    return any(map(is_hooked, modules))


class RowParallelLinear(ParallelLinear):
    """Linear layer with sharded input features: y = x Wᵀ + bias. The bias is added once, after the reduction."""

    # Shapes in `forward`: x [s, b, in/t] -> y [s, b, out], or [s/t, b, out] under sequence parallelism; W [out, in/t].
    def __init__(self, linear: RowLinear, ctx: TPContext) -> None:
        super().__init__(linear.name, linear.metas(ctx.sequence_parallel), row_boundary(ctx), ctx)
        self.adds_residual = True
        """True if the GEMM of this layer may add the residual stream to its output. `gemm_choice` sets this attribute
        to False if it is faster to add the residual stream in the next norm."""

    def takes_addend(self) -> bool:
        """Return True if the layer's GEMM can add the residual stream to the output. This requires that no collective
        sums the output, no hook is registered, and a kernel is available."""
        adds = self.compiled and self.training and self.adds_residual and self.gemms.adds_residual
        local = type(self) is RowParallelLinear and self.boundary.leave is start_nothing
        kernel = kernel_for("residual_gemm", None, matrix_of(self.weight))
        return adds and local and not observed(self) and kernel is not None


def column_parallel(linear: ColumnLinear, ctx: TPContext) -> ColumnParallelLinear:
    """Build a column-parallel layer with the implementation registered in `LINEARS`."""
    layer: ColumnParallelLinear = LINEARS.build("column_parallel", linear, ctx)
    return layer


def row_parallel(linear: RowLinear, ctx: TPContext) -> RowParallelLinear:
    """Build a row-parallel layer with the implementation registered in `LINEARS`."""
    layer: RowParallelLinear = LINEARS.build("row_parallel", linear, ctx)
    return layer


class ReplicatedParallelLinear(ParallelLinear):
    """Linear layer with a replicated weight: y = x Wᵀ + bias. The forward pass needs no collective. Under sequence
    parallelism, the weight gradient on each rank is a partial sum."""

    # Shapes in `forward`: x [s, b, in] -> y [s, b, out], or both [s/t, b, ...] under sequence parallelism; W [out, in].
    def __init__(self, linear: ReplicatedLinear, ctx: TPContext) -> None:
        boundary = LOCAL_SEQUENCE if ctx.sequence_parallel and ctx.tp.size > 1 else LOCAL
        super().__init__(linear.name, linear.metas(ctx.sequence_parallel), boundary, ctx)


def local_rows(rows: int, axis: Axis) -> tuple[int, int]:
    """Return the range [start, stop) of vocabulary rows on this rank."""
    assert rows % axis.size == 0, f"{rows} vocabulary rows do not divide over {axis.size} ranks"
    part = rows // axis.size
    return axis.rank * part, (axis.rank + 1) * part


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Check that every id is in [0, size). An id outside this range belongs to no rank's vocabulary shard, so without
    the check it would silently have no effect. On CPU, an invalid id raises ValueError. On a GPU, the check is a
    device-side assertion, because the host would have to wait to read the ids."""
    message = f"{what} must be in [0, {size}), the vocabulary; check --vocab-size and the tokenizer of the data"
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if ids.device.type == "cpu" and not 0 <= int(low) <= int(high) < size:
        raise ValueError(f"{message}: found ids from {int(low)} to {int(high)}")
    if ids.is_cuda:
        assert_async((low >= 0) & (high < size), message)


class OutputLayer(nn.Module):
    """Output projection from hidden states to logits, with a sharded vocabulary. `metas` contains the `ParamMeta`s of
    the weight and of the optional bias. If `tied_weight` is given, the layer uses it instead of creating a weight."""

    def __init__(self, *metas: ParamMeta, ctx: TPContext, tied_weight: nn.Parameter | None = None) -> None:
        super().__init__()
        weight, *bias = metas
        self.weight = make_parameter(weight, ctx) if tied_weight is None else tied_weight
        self.bias = make_parameter(bias[0], ctx) if bias else None
        self.axis = ctx.tp
        self.queue = ctx.queue
        self.boundary = column_boundary(ctx)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [s, b, V/t] from x [s, b, h], or [s/t, b, h] under sequence parallelism, and W [V/t, h]."""
        return LinearFunction.apply(x, self.weight, self.bias, self.boundary, self.axis, self.queue, PLAIN)
