"""Normalisation of hidden states and of attention heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.parts import NORMALIZATIONS
from megatron.core.tensor_parallel.layers import TPContext, make_parameter

PARTIAL_OVER_TP = ("tp",)


def sequence_partial(ctx: TPContext) -> tuple[str, ...]:
    """`partial_over` of a replicated parameter that acts between the linear layers.

    Without sequence parallelism every rank sees all tokens and the whole gradient of them, so replicas agree as they
    are; with it a rank sees its part of the sequence, and its gradient is one term of a sum.
    """
    return PARTIAL_OVER_TP if ctx.sequence_parallel else ()


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim; 16-bit inputs are normalised in fp32."""

    def __init__(
        self, name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.shape, self.eps = (size,), config.norm_epsilon
        self.weight = make_parameter(
            ParamMeta(f"{name}.weight", self.shape, init=Init("ones"), partial_over=partial_over), ctx
        )
        self.bias = make_parameter(
            ParamMeta(f"{name}.bias", self.shape, init=Init("zeros"), partial_over=partial_over), ctx
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv:1910.07467); 16-bit inputs in fp32."""

    def __init__(
        self, name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.shape, self.eps = (size,), config.norm_epsilon
        self.weight = make_parameter(
            ParamMeta(f"{name}.weight", self.shape, init=Init("ones"), partial_over=partial_over), ctx
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def build_norm(
    name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over: tuple[str, ...] | None = None
) -> nn.Module:
    """The model's norm over `size` channels, its parameters under `name`.

    By default it acts on hidden states between the linear layers (`sequence_partial`).
    """
    partial_over = sequence_partial(ctx) if partial_over is None else partial_over
    return NORMALIZATIONS[config.normalization](name, size, config, ctx, partial_over)
