"""Local experts of a rank: two grouped linear layers that process rows sorted by expert.

The weights [E, ..., in] are sharded along two dims: E is sharded over the expert-parallel ranks, and the FFN width of
the experts over the expert tensor-parallel ranks. Each expert tensor-parallel rank therefore computes a partial sum of
the experts' output. The dispatcher adds up these partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region
from megatron.core.config.activations import Activation
from megatron.core.config.model import TransformerConfig
from megatron.core.moe.grouped_gemms import EACH, GROUPED, GroupedGemms, Segments, has_grouped_kernel, matrices_of
from megatron.core.param_meta import Fused, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.tensor_parallel.linear_gemms import Cuts
from megatron.core.tensor_parallel.weight_grad import (
    WeightGradQueue,
    accumulate_weight_grad,
    saved_without_graph,
)
from megatron.core.torch_private import AutogradContext
from megatron.core.transformer.activations import FusedActivation, Kind, build_activation, functions_of
from megatron.core.transformer.recompute import with_input_recomputed


class _GroupedLinearContext(AutogradContext):
    weight: Tensor
    segments: Segments
    gemms: GroupedGemms
    queue: WeightGradQueue


class GroupedLinearFunction(torch.autograd.Function):
    """Autograd function of a grouped linear layer: x [n, in] -> [n, out]. Each row of x is multiplied by the weight
    [out, in] of the row's expert."""

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
            gemms.add_weight_grad_(matrices_of(out.zero_() if overwrite else out), dy, x, segments)

        return dx, accumulate_weight_grad(weight, add_dw_, ctx.queue), None, None, None


def _with_bias(y: Tensor, bias: Tensor, experts: Tensor, factors: Tensor | None, first: int) -> Tensor:
    """Add the bias of the row's expert to each row of y [n, out]. `bias` [experts, columns] is added to the columns of
    y from column `first` on.

    If `factors` [n] is given, each row's bias is first multiplied by the row's factor.
    """
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
    """Autograd function that adds the bias of the row's expert to each row of y [n, out]. `bias` [experts, ...,
    columns] is flattened to [experts, columns] and added to the columns of y from column `first` on.

    If `factors` [n] is given, each row's bias is first multiplied by the row's factor.
    """

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
            """Add the bias gradient to `out`. The bias is treated as the weight of one additional input feature. The
            value of this feature in a row is the row's factor."""
            out = (out.zero_() if overwrite else out).view(*bias.shape, 1)
            ctx.layer.gemms.add_bias_grad_(out, columns, weights[:, None], segments)

        db = accumulate_weight_grad(ctx.bias, add_db_, ctx.layer.queue)
        return dy, db, of_factors, None, None, None


def _build_gemms(grouped: bool, cuts: Cuts, ctx: TPContext) -> GroupedGemms:
    """Return the GEMMs of a grouped linear layer. `cuts` states whether the input or output features of the layer are
    sharded over the expert tensor-parallel ranks."""
    plain = GROUPED if grouped else EACH
    if ctx.format is None:
        return plain
    axis = ctx.state.axis("expt_tp")
    built: GroupedGemms = ctx.format.grouped(axis, cuts, grouped, ctx.compiled, plain.add_weight_grad_)
    return built


class _WeightedContext(AutogradContext):
    activation: Activation
    parameters: tuple[Tensor, ...]


class _WeightedActivation(torch.autograd.Function):
    """Autograd function that computes activation(x) * weight for each row. Only x and the routing weights are saved for
    the backward pass.

    The routing weights are applied before the second linear layer instead of after it. The gradient of the routing
    weights therefore does not require the outputs of the experts, so these outputs need not be saved.
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
    """Return the gradients of activation(x) * weights with respect to x [n, f] and with respect to the weights [n]."""
    forward, backward = functions_of(kind)
    d_weights = (grad * forward(x)).sum(-1, dtype=weights.dtype)
    return backward(x, grad * weights[:, None].to(grad.dtype)), d_weights


class _FusedWeightedContext(AutogradContext):
    kind: Kind
    compiled: bool


class FusedWeightedActivation(torch.autograd.Function):
    """Compiled variant of `_WeightedActivation`, for activation functions whose gradient is known in closed form. The
    compiled kernels store no intermediate results in memory."""

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
    """Linear layer of all local experts: x [n, in], weight [E/ep, ..., in], optional bias [E/ep, ...] -> [n, out].

    If the input features are sharded (`cuts.inputs`), the output is a partial sum, and the columns of the bias are
    sharded over the expert tensor-parallel ranks.
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
        """Apply the layer to x [n, in]. `factors` [n] contains a factor for each row, by which the row's bias is
        multiplied. The default factor is 1."""
        y = GroupedLinearFunction.apply(x, self.weight, segments, self.gemms, self.queue)
        if self.bias is None:
            return y
        return GroupedBiasFunction.apply(y, self.bias, factors, segments, self.first_column, self)


class Experts(nn.Module):
    """MLPs of the local experts. An expert computes weight * fc2(activation(fc1(x))). With --moe-apply-probs-on-input,
    an expert computes fc2(activation(fc1(weight * x)))."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        widths = config.expert_io_size, config.moe_ffn_size // ctx.state.axis("expt_tp").size
        if ctx.format is None:
            self.grouped = config.moe_grouped_gemm and has_grouped_kernel(ctx.dtype, ctx.device, *widths)
        else:
            self.grouped = config.moe_grouped_gemm and ctx.format.groups_in_one_kernel(ctx.device)
        cut = ctx.state.axis("expt_tp").size > 1
        self.linear_fc1, self.linear_fc2 = (
            GroupedLinear(metas, cuts, self.grouped, ctx)
            for metas, cuts in zip(expert_metas(name, config), (Cuts(outputs=cut), Cuts(inputs=cut)), strict=True)
        )
        self.activation = build_activation(f"{name}.activation", config, ctx)
        # The activation's parameters are inputs of the autograd function, so that its backward pass can return their
        # gradients.
        self.activation_parameters = (
            tuple(self.activation.parameters()) if isinstance(self.activation, nn.Module) else ()
        )
        self.recompute_activation = config.recomputes("moe_act")
        self.weights_inputs, self.compiled = config.moe_apply_probs_on_input, ctx.compiled

    def forward(self, rows: Tensor, weights: Tensor, segments: Segments) -> Tensor:
        """Apply the experts: rows [n, h], routing weights [n] -> outputs [n, h]. The outputs of each expert
        tensor-parallel rank are a partial sum."""

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
    """Return two lists of `ParamMeta`s, for linear_fc1 and for linear_fc2. Each list describes the stacked weights of
    all experts, and their stacked biases if the linear layers have biases.

    If the MLP is gated, the weight of linear_fc1 has the shape [E, 2, ffn, h] and contains the gate and the up
    projection. If --moe-latent-size is set, h is the latent size. The output of linear_fc2 on an expert tensor-parallel
    rank is a partial sum. The columns of the linear_fc2 bias are sharded over these ranks, so that each bias element is
    added on one rank only.
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
