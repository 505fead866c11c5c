"""Normalisation of hidden states and of attention heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.model import TransformerConfig
from megatron.core.parts import NORMALIZATIONS
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.tensor_parallel.parameters import sequence_partial
from megatron.core.transformer.parameters import norm_metas


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim; 16-bit inputs are normalised in fp32."""

    has_bias = True

    def __init__(
        self, name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.shape, self.eps = (size,), config.norm_epsilon
        self.one_plus = config.apply_layernorm_1p
        metas = norm_metas(name, size, partial_over, config, bias=self.has_bias)
        weight, *bias = (make_parameter(meta, ctx) for meta in metas)
        self.weight, self.bias = weight, bias[0] if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_plus:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        wide, weight = _one_plus(x, self.weight)
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        return F.layer_norm(wide, self.shape, weight, bias, self.eps).to(x.dtype)


class RMSNorm(LayerNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv:1910.07467); 16-bit inputs in fp32."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_plus:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        wide, weight = _one_plus(x, self.weight)
        return F.rms_norm(wide, self.shape, weight, self.eps).to(x.dtype)


def _one_plus(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(x, 1 + weight) for --apply-layernorm-1p, in fp32 if x has 16 bits: small weights would be lost beside 1."""
    wide = x.float() if x.itemsize == 2 else x
    return wide, weight.to(wide.dtype) + 1


def build_norm(
    name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over: tuple[str, ...] | None = None
) -> nn.Module:
    """The model's norm over `size` channels, its parameters under `name`.

    By default it acts on hidden states between the linear layers (`sequence_partial`).
    """
    partial_over = sequence_partial(ctx.sequence_parallel) if partial_over is None else partial_over
    return NORMALIZATIONS[config.normalization](name, size, config, ctx, partial_over)
