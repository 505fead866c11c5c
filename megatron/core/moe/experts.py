"""Experts of one rank: two grouped linear layers over rows that are sorted by expert.

Weights are [E, ..., in], sharded over expert parallelism along E and over expert tensor parallelism along the experts'
width. A rank's output is a partial sum over expert tensor parallelism; the dispatcher reduces it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.config.model import TransformerConfig
from megatron.core.host_to_device import integers_on
from megatron.core.moe.parameters import expert_metas
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.tensor_parallel.weight_grad import (
    WeightGradQueue,
    accumulate_weight_grad,
    add_product_,
    saved_without_graph,
)
from megatron.core.transformer.activations import Activation, build_activation
from megatron.core.transformer.recompute import with_input_recomputed


@dataclass(frozen=True)
class Segments:
    """Number of rows of each local expert; rows are sorted by expert."""

    splits: tuple[int, ...]
    device: torch.device

    @cached_property
    def ends(self) -> Tensor:
        """[experts] int32: end of each expert's rows."""
        return integers_on(self.device, accumulate(self.splits), torch.int32)


GroupedGemm = Callable[[Tensor, Tensor, Segments], Tensor]
"""x [n, in], matrices [experts, in, out] -> [n, out]: multiplies each row by the matrix of its expert."""


def gemm_each(x: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """Grouped GEMM as one GEMM for each expert that has rows."""
    out = x.new_empty(x.shape[0], matrices.shape[-1])
    for rows, matrix, part in zip(x.split(segments.splits), matrices, out.split(segments.splits), strict=True):
        if rows.shape[0]:
            torch.mm(rows, matrix, out=part)
    return out


def gemm_grouped(x: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """Grouped GEMM in one kernel. `gemm_each` computes the same."""
    if not x.shape[0]:
        return x.new_empty(0, matrices.shape[-1])
    return F.grouped_mm(x, matrices, offs=segments.ends)


def has_grouped_kernel(dtype: torch.dtype, *widths: int) -> bool:
    """Whether torch's grouped GEMM takes matrices of these widths: their rows must be multiples of 16 bytes."""
    return dtype != torch.float64 and all(width * dtype.itemsize % 16 == 0 for width in widths)


class GroupedLinearFunction(torch.autograd.Function):
    """Grouped linear layer: multiplies each row of x [n, in] by the W [out, in] of its expert -> y [n, out]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, segments: Segments, gemm: GroupedGemm, queue: WeightGradQueue
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.segments, ctx.gemm, ctx.queue = weight, segments, gemm, queue
        return gemm(x, _matrices(weight).transpose(1, 2), segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved_without_graph(ctx)
        weight, segments = ctx.weight, ctx.segments
        dy = dy.contiguous()
        dx = ctx.gemm(dy, _matrices(weight), segments) if ctx.needs_input_grad[0] else None

        def add_dw_(out: Tensor) -> None:
            for expert, dy_rows, x_rows in zip(
                _matrices(out), dy.split(segments.splits), x.split(segments.splits), strict=True
            ):
                if x_rows.shape[0]:
                    add_product_(expert, dy_rows, x_rows)

        return dx, accumulate_weight_grad(weight, add_dw_, ctx.queue), None, None, None


def _matrices(weight: Tensor) -> Tensor:
    """[experts, ..., in] -> [experts, out, in]"""
    return weight.view(weight.shape[0], -1, weight.shape[-1])


class _WeightedActivation(torch.autograd.Function):
    """activation(x) * weight, row by row, that saves only x and the weights for backward.

    A token's routing weight is applied here, before the second layer and not after it, so that its gradient needs no
    output of the experts.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, activation: Activation, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.activation, ctx.parameters = activation, parameters
        return activation(x) * weights[:, None].to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            active = ctx.activation(x)
        d_weights = (grad * active.detach()).sum(-1, dtype=weights.dtype)
        wanted = [x, *(parameter for parameter in ctx.parameters if parameter.requires_grad)]
        found = iter(torch.autograd.grad(active, wanted, grad * weights[:, None].to(grad.dtype)))
        return next(found), d_weights, None, *(next(found) if p.requires_grad else None for p in ctx.parameters)


class GroupedLinear(nn.Module):
    """One linear layer of all local experts: x [n, in] -> [n, out]; W [E/ep, ..., in]."""

    def __init__(self, meta: ParamMeta, ctx: TPContext, gemm: GroupedGemm) -> None:
        super().__init__()
        self.weight = make_parameter(meta, ctx)
        self.gemm, self.queue = gemm, ctx.queue

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        return GroupedLinearFunction.apply(x, self.weight, segments, self.gemm, self.queue)


class Experts(nn.Module):
    """MLPs of the local experts: fc2(weight * activation(fc1(x)))."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        widths = config.hidden_size, config.moe_ffn_size // ctx.experts.expt_tp.size
        gemm = gemm_grouped if config.moe_grouped_gemm and has_grouped_kernel(ctx.dtype, *widths) else gemm_each
        self.linear_fc1, self.linear_fc2 = (GroupedLinear(meta, ctx, gemm) for meta in expert_metas(name, config))
        self.activation = build_activation(f"{name}.activation", config, ctx)
        # Inputs of the autograd Function, so that their gradients are computed with those of the rows.
        self.activation_parameters = (
            tuple(self.activation.parameters()) if isinstance(self.activation, nn.Module) else ()
        )
        self.recompute_activation = config.recomputes("moe_act")

    def forward(self, rows: Tensor, weights: Tensor, segments: Segments) -> Tensor:
        """rows [n, h], routing weights [n] -> [n, h], a partial sum over expert tensor parallelism"""

        def activate(hidden: Tensor) -> Tensor:
            return _WeightedActivation.apply(hidden, weights, self.activation, *self.activation_parameters)

        hidden = self.linear_fc1(rows, segments)
        if self.recompute_activation and self.training:
            return with_input_recomputed(activate, hidden, self.linear_fc2, segments)
        return self.linear_fc2(activate(hidden), segments)
