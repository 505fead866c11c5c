"""Experts of one rank: two grouped linear layers over rows that are sorted by expert.

Weights are [E, ..., in], sharded over expert parallelism along E and over expert tensor parallelism along the experts'
width. A rank's output is a partial sum over expert tensor parallelism; the dispatcher reduces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region, torch_function
from megatron.core.config.activations import Activation
from megatron.core.config.model import TransformerConfig
from megatron.core.host_to_device import HostCopy, has_values, integers_on
from megatron.core.param_meta import Fused, ParamMeta
from megatron.core.parts import operation
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.tensor_parallel.linear_gemms import Cuts
from megatron.core.tensor_parallel.weight_grad import (
    WeightGradQueue,
    accumulate_weight_grad,
    add_product_,
    saved_without_graph,
)
from megatron.core.torch_private import AutogradContext
from megatron.core.transformer.activations import FusedActivation, Kind, build_activation, functions_of
from megatron.core.transformer.recompute import with_input_recomputed


class Segments:
    """Rows of the local experts, sorted by expert. Rows behind those of the last expert are spare: they belong to no
    expert, their contents are finite and without meaning, and they have no gradient.

    The numbers of rows are on the device (`of_counts`), where kernels read them, or known to the host (`of_sizes`),
    which can then cut tensors into parts.
    """

    def __init__(self, sizes: Sequence[int] | None, ends: Tensor | None, device: torch.device, spare: bool) -> None:
        self._sizes = sizes
        self._ends = ends
        self._device = device
        self.spare = spare

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], device: torch.device) -> Segments:
        """sizes [experts] on the host; no spare rows"""
        return cls(sizes, None, device, spare=False)

    @classmethod
    def of_counts(cls, counts: Tensor, spare: bool) -> Segments:
        """counts [experts] on the device; `spare` says whether there may be spare rows"""
        return cls(None, counts.cumsum(0, dtype=torch.int32), counts.device, spare)

    @property
    def ends(self) -> Tensor:
        """[experts] int32 on the device: end of each expert's rows."""
        if self._ends is None:
            assert self._sizes is not None
            self._ends = integers_on(self._device, accumulate(self._sizes), torch.int32)
        return self._ends

    @property
    def sizes(self) -> Sequence[int]:
        """Number of rows of each expert. The host waits where it does not know them."""
        if self._sizes is None:
            ends = [0, *HostCopy[int](self.ends).read()]
            self._sizes = [stop - start for start, stop in pairwise(ends)]
        return self._sizes

    def experts_of(self, rows: int) -> Tensor:
        """[rows] int64 on the device: the expert of each row; that of spare rows is some expert."""
        ends = self.ends[:-1].contiguous()
        return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)

    def sizes_of(self, x: Tensor) -> Sequence[int]:
        """Number of rows of each expert in x [n, ...]. Reads `sizes`; without values there are none, and the parts are
        even."""
        if self._sizes is None and not has_values(x):
            (rows, *_), experts = x.shape, self.ends.shape[0]
            return [rows // experts + (number < rows % experts) for number in range(experts)]
        return self.sizes

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """x [n, ...] -> the rows of each expert. Reads `sizes`."""
        sizes = self.sizes_of(x)
        return (x[: sum(sizes)] if self.spare else x).split(tuple(sizes))

    def clear_spare_(self, x: Tensor) -> Tensor:
        """Sets the spare rows of x [n, width] to zero: kernels leave there what the memory held."""
        if self.spare:
            clear_rows_behind_(x, self.ends)
        return x


@operation
def clear_rows_behind_(x: Tensor, ends: Tensor) -> None:
    """Sets the rows of x [n, width] from ends[-1] on to zero."""
    rows = torch.arange(x.shape[0], device=x.device)
    x.masked_fill_((rows >= ends[-1])[:, None], 0.0)


GroupedGemm = Callable[[Tensor, Tensor, Segments], Tensor]
"""Grouped GEMM: x [n, in], matrices [experts, in, out] -> [n, out], each row times the matrix of its expert, spare rows
0."""


def gemm_each(x: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """Grouped GEMM as one GEMM for each expert that has rows."""
    out = x.new_empty(x.shape[0], matrices.shape[-1])
    for rows, matrix, part in zip(segments.split(x), matrices, segments.split(out), strict=True):
        if rows.shape[0]:
            torch.mm(rows, matrix, out=part)
    return segments.clear_spare_(out)


def gemm_grouped(x: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """Grouped GEMM in one kernel. `gemm_each` computes the same."""
    if not x.shape[0]:
        return x.new_empty(0, matrices.shape[-1])
    return segments.clear_spare_(F.grouped_mm(x, matrices, offs=segments.ends))


def add_each_product_(out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> None:
    """out[e] [o, i] += dy_e [n_e, o]ᵀ x_e [n_e, i] for each expert e that has rows, in the precision of `out`, by one
    product for each."""
    for expert, dy_rows, x_rows in zip(out, segments.split(dy), segments.split(x), strict=True):
        if x_rows.shape[0]:
            add_product_(expert, dy_rows, x_rows)


@operation
@torch_function
def add_products_grouped_(out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> None:
    """`add_each_product_`, for a kernel that does it at once."""
    add_each_product_(out, dy, x, segments)


def has_grouped_kernel(dtype: torch.dtype, device: torch.device, *widths: int) -> bool:
    """Whether torch has a grouped GEMM of this dtype on the device, and for matrices of these widths: rows must be
    multiples of 16 bytes. On other GPUs than these its function reads the numbers of rows and makes a product for each
    expert, as `gemm_each` does."""
    if device.type == "cuda":
        kernel = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)
    else:
        kernel = dtype != torch.float64
    return kernel and all(width * dtype.itemsize % 16 == 0 for width in widths)


class GroupedGemms:
    """The products of a grouped linear layer, here in the precision of the parameters. Those of a format of
    `LINEAR_FORMATS` have the same attributes."""

    def __init__(self, gemm: GroupedGemm, add_weight_grad_: Callable[[Tensor, Tensor, Tensor, Segments], None]) -> None:
        self.gemm, self.add_weight_grad_ = gemm, add_weight_grad_
        """(out [experts, out, in], dY [n, out], x [n, in], segments): out += dYᵀ X of each expert"""

    def forward(self, x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        """x [n, in], weight [experts, ..., in] -> y [n, out]"""
        return self.gemm(x, _matrices(weight).transpose(1, 2), segments)

    def input_grad(self, dy: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        """dY [n, out], weight [experts, ..., in] -> dX [n, in]"""
        return self.gemm(dy, _matrices(weight), segments)


GROUPED = GroupedGemms(gemm_grouped, add_products_grouped_)
"""In a kernel for all experts, which reads the numbers of rows on the device."""

EACH = GroupedGemms(gemm_each, add_each_product_)
"""One for each expert. The host cuts the rows into parts."""


class _GroupedLinearContext(AutogradContext):
    weight: Tensor
    segments: Segments
    gemms: GroupedGemms
    queue: WeightGradQueue


class GroupedLinearFunction(torch.autograd.Function):
    """Grouped linear layer: multiplies each row of x [n, in] by the W [out, in] of its expert -> y [n, out]."""

    @staticmethod
    def forward(
        ctx: _GroupedLinearContext,
        x: Tensor,
        weight: Tensor,
        segments: Segments,
        gemms: GroupedGemms,
        queue: WeightGradQueue,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.segments = segments
        ctx.gemms = gemms
        ctx.queue = queue
        return gemms.forward(x, weight, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GroupedLinearContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved_without_graph(ctx)
        weight = ctx.weight
        segments = ctx.segments
        gemms = ctx.gemms
        dy = dy.contiguous()
        dx = gemms.input_grad(dy, weight, segments) if ctx.needs_input_grad[0] else None

        def add_dw_(out: Tensor, overwrite: bool) -> None:
            gemms.add_weight_grad_(_matrices(out.zero_() if overwrite else out), dy, x, segments)

        return dx, accumulate_weight_grad(weight, add_dw_, ctx.queue), None, None, None


def _with_bias(y: Tensor, bias: Tensor, experts: Tensor, factors: Tensor | None, first: int) -> Tensor:
    """y [n, out] with the row of bias [experts, columns] of each expert, times the `factors` [n], if given, added to
    the columns from `first` on."""
    added = bias[experts]
    if factors is not None:
        added = added * factors[:, None].to(y.dtype)
    behind = y.shape[1] - first - bias.shape[1]
    return y + (F.pad(added, (first, behind)) if first or behind else added)


def _gradient_of_factors(dy: Tensor, bias: Tensor, experts: Tensor, factors: Tensor) -> Tensor:
    return (dy * bias[experts]).sum(-1, keepdim=True, dtype=factors.dtype)


class _GroupedBiasContext(AutogradContext):
    bias: Tensor
    segments: Segments
    first: int
    layer: GroupedLinear


class GroupedBiasFunction(torch.autograd.Function):
    """Adds to each row of y [n, out] the bias [experts, ..., columns] of its expert, times its factor [n] if there are
    factors. `first` is the first of these columns."""

    @staticmethod
    def forward(
        ctx: _GroupedBiasContext,
        y: Tensor,
        bias: Tensor,
        factors: Tensor | None,
        segments: Segments,
        first: int,
        layer: GroupedLinear,
    ) -> Tensor:
        ctx.save_for_backward(factors)
        ctx.bias = bias
        ctx.segments = segments
        ctx.first = first
        ctx.layer = layer
        add = region(_with_bias, layer.compiled)
        return add(y, bias.flatten(1), segments.experts_of(y.shape[0]), factors, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GroupedBiasContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        (factors,) = ctx.saved_tensors
        bias = ctx.bias.flatten(1)
        segments = ctx.segments
        columns = dy.narrow(1, ctx.first, bias.shape[1]).contiguous()
        of_factors = None
        if factors is not None and ctx.needs_input_grad[2]:
            experts = segments.experts_of(dy.shape[0])
            of_factors = region(_gradient_of_factors, ctx.layer.compiled)(columns, bias, experts, factors)
            of_factors = segments.clear_spare_(of_factors)[:, 0]
        weights = columns.new_ones(dy.shape[0]) if factors is None else factors.detach().to(dy.dtype)

        def add_db_(out: Tensor, overwrite: bool) -> None:
            """The bias is the weight of one more input, the factor."""
            out = (out.zero_() if overwrite else out).view(*bias.shape, 1)
            ctx.layer.gemms.add_weight_grad_(out, columns, weights[:, None], segments)

        db = accumulate_weight_grad(ctx.bias, add_db_, ctx.layer.queue)
        return dy, db, of_factors, None, None, None


def _build_gemms(grouped: bool, cuts: Cuts, ctx: TPContext) -> GroupedGemms:
    """The products of a layer whose features are sharded over expert tensor parallelism as `cuts` says."""
    plain = GROUPED if grouped else EACH
    if ctx.format is None:
        return plain
    axis = ctx.state.axis("expt_tp")
    built: GroupedGemms = ctx.format.grouped(axis, cuts, grouped, ctx.compiled, plain.add_weight_grad_)
    return built


def _matrices(weight: Tensor) -> Tensor:
    """[experts, ..., in] -> [experts, out, in]"""
    return weight.view(weight.shape[0], -1, weight.shape[-1])


class _WeightedContext(AutogradContext):
    activation: Activation
    parameters: tuple[Tensor, ...]


class _WeightedActivation(torch.autograd.Function):
    """activation(x) * weight, row by row, that saves only x and the weights for backward.

    A token's routing weight is applied here, before the second layer and not after it, so that its gradient needs no
    output of the experts.
    """

    @staticmethod
    def forward(
        ctx: _WeightedContext, x: Tensor, weights: Tensor, activation: Activation, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.activation, ctx.parameters = activation, parameters
        return activation(x) * weights[:, None].to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _WeightedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            active = ctx.activation(x)
        d_weights = (grad * active.detach()).sum(-1, dtype=weights.dtype)
        wanted = [x, *(parameter for parameter in ctx.parameters if parameter.requires_grad)]
        found = iter(torch.autograd.grad(active, wanted, grad * weights[:, None].to(grad.dtype)))
        return next(found), d_weights, None, *(next(found) if p.requires_grad else None for p in ctx.parameters)


def _weighted_forward(x: Tensor, weights: Tensor, kind: Kind) -> Tensor:
    return functions_of(kind)[0](x) * weights[:, None].to(x.dtype)


def _weighted_backward(x: Tensor, weights: Tensor, grad: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Gradients of x [n, f] and of the weights [n]."""
    forward, backward = functions_of(kind)
    d_weights = (grad * forward(x)).sum(-1, dtype=weights.dtype)
    return backward(x, grad * weights[:, None].to(grad.dtype)), d_weights


class _FusedWeightedContext(AutogradContext):
    kind: Kind
    compiled: bool


class FusedWeightedActivation(torch.autograd.Function):
    """`_WeightedActivation` of a function whose gradient is known: compiled, no product is written in between."""

    @staticmethod
    def forward(ctx: _FusedWeightedContext, x: Tensor, weights: Tensor, kind: Kind, compiled: bool) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.kind, ctx.compiled = kind, compiled
        return region(_weighted_forward, compiled)(x, weights, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: _FusedWeightedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        dx, d_weights = region(_weighted_backward, ctx.compiled)(x, weights, grad, ctx.kind)
        return dx, d_weights, None, None


class GroupedLinear(nn.Module):
    """One linear layer of all local experts: x [n, in] -> [n, out]; W [E/ep, ..., in], b [E/ep, ...] if there are
    biases.

    If `cuts` says that the inputs are sharded, the output is a partial sum, of which a rank has the bias of its part of
    the columns.
    """

    def __init__(self, metas: Sequence[ParamMeta], cuts: Cuts, grouped: bool, ctx: TPContext) -> None:
        super().__init__()
        weight, *bias = (make_parameter(meta, ctx) for meta in metas)
        self.weight, self.bias = weight, bias[0] if bias else None
        self.gemms = _build_gemms(grouped, cuts, ctx)
        self.queue = ctx.queue
        self.compiled = ctx.compiled
        self.first_column = ctx.state.axis("expt_tp").rank * bias[0].shape[1] if bias and cuts.inputs else 0

    def forward(self, x: Tensor, segments: Segments, factors: Tensor | None = None) -> Tensor:
        """`factors` [n]: each row's factor of the bias; 1 by default"""
        y = GroupedLinearFunction.apply(x, self.weight, segments, self.gemms, self.queue)
        if self.bias is None:
            return y
        return GroupedBiasFunction.apply(y, self.bias, factors, segments, self.first_column, self)


class Experts(nn.Module):
    """MLPs of the local experts: weight * fc2(activation(fc1(x))), or with --moe-apply-probs-on-input
    fc2(activation(fc1(weight * x)))."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        widths = config.expert_io_size, config.moe_ffn_size // ctx.state.axis("expt_tp").size
        self.grouped = config.moe_grouped_gemm and has_grouped_kernel(ctx.dtype, ctx.device, *widths)
        if ctx.format is not None:
            self.grouped = self.grouped and ctx.format.groups_in_one_kernel(ctx.device)
        cut = ctx.state.axis("expt_tp").size > 1
        self.linear_fc1, self.linear_fc2 = (
            GroupedLinear(metas, cuts, self.grouped, ctx)
            for metas, cuts in zip(expert_metas(name, config), (Cuts(outputs=cut), Cuts(inputs=cut)), strict=True)
        )
        self.activation = build_activation(f"{name}.activation", config, ctx)
        # Inputs of the autograd Function, so that their gradients are computed with those of the rows.
        self.activation_parameters = (
            tuple(self.activation.parameters()) if isinstance(self.activation, nn.Module) else ()
        )
        self.recompute_activation = config.recomputes("moe_act")
        self.weights_inputs, self.compiled = config.moe_apply_probs_on_input, ctx.compiled

    def forward(self, rows: Tensor, weights: Tensor, segments: Segments) -> Tensor:
        """rows [n, h], routing weights [n] -> [n, h], a partial sum over expert tensor parallelism"""

        factors: Tensor | None = weights
        if self.weights_inputs:
            rows, factors = FusedWeightedActivation.apply(rows, weights, "identity", self.compiled), None

        def activate(hidden: Tensor) -> Tensor:
            if factors is None:
                return self.activation(hidden)
            if isinstance(self.activation, FusedActivation):
                return FusedWeightedActivation.apply(hidden, weights, self.activation.kind, self.activation.compiled)
            return _WeightedActivation.apply(hidden, weights, self.activation, *self.activation_parameters)

        hidden = self.linear_fc1(rows, segments)
        if self.recompute_activation and self.training:
            return with_input_recomputed(activate, hidden, self.linear_fc2, segments, factors)
        return self.linear_fc2(activate(hidden), segments, factors)


def expert_metas(name: str, config: TransformerConfig) -> tuple[list[ParamMeta], list[ParamMeta]]:
    """Weights of linear_fc1 and linear_fc2 of all experts, each with its bias if there are biases. A gated fc1 stacks
    gate and up: [E, 2, ffn, h], h being the width of the latent of --moe-latent-size if there is one.

    The output of linear_fc2 is a partial sum over expert tensor parallelism: each rank holds the bias of a part of the
    columns, and adds that.
    """
    count = config.num_experts
    hidden = config.expert_io_size
    ffn = config.moe_ffn_size
    assert count is not None
    fc1, dim = ((count, 2, ffn, hidden), 2) if config.gated else ((count, ffn, hidden), 1)
    fused = Fused("gate_up", 1, (1, 1)) if config.gated else None
    fc1_cut, fc2_cut = {"ep": 0, "expt_tp": dim}, {"ep": 0, "expt_tp": 2}
    weights = (
        ParamMeta(f"{name}.linear_fc1.weight", fc1, fc1_cut, role="hidden", expert=True, stacked=1, fused=fused),
        ParamMeta(
            f"{name}.linear_fc2.weight",
            (count, hidden, ffn),
            fc2_cut,
            role="hidden",
            to_residual=True,
            expert=True,
            stacked=1,
        ),
    )
    biases = (
        ParamMeta(f"{name}.linear_fc1.bias", fc1[:-1], fc1_cut, role="bias", expert=True),
        ParamMeta(f"{name}.linear_fc2.bias", (count, hidden), {"ep": 0, "expt_tp": 1}, role="bias", expert=True),
    )
    fc1_metas, fc2_metas = (
        [weight, bias] if config.add_bias_linear else [weight] for weight, bias in zip(weights, biases, strict=True)
    )
    return fc1_metas, fc2_metas
