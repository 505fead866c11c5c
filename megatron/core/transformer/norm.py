"""Normalization of hidden states and of attention heads."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.collectives import copy_to, reduce_from
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.config.norms import NORMALIZATIONS
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.tensor_parallel.linear_spec import sequence_partial

HEAD_NORM_PARTIAL_OVER = ("tp",)
"""Value of `ParamMeta.partial_over` for a norm weight that is shared by all attention heads.

Each rank holds only some of the heads, so the gradient on a rank is a partial sum, both with and without sequence
parallelism.
"""


class LayerNorm(nn.Module):
    """Layer normalization over the last dim: (x - mean) / sqrt(var + eps) * weight + bias. 16-bit inputs are normalized
    in fp32."""

    has_bias = True

    def __init__(
        self, name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.shape, self.eps = (size,), config.norm_epsilon
        self.one_plus = config.apply_layernorm_1p
        weight = ParamMeta(f"{name}.weight", (size,), partial_over=partial_over, role="norm")
        bias = ParamMeta(f"{name}.bias", (size,), partial_over=partial_over, role="bias")
        biased = self.has_bias and config.norm_parameters == "all"
        self.weight = None if config.norm_parameters == "none" else make_parameter(weight, ctx)
        self.bias = make_parameter(bias, ctx) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_plus:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        assert self.weight is not None
        wide, weight = _one_plus(x, self.weight)
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        return F.layer_norm(wide, self.shape, weight, bias, self.eps).to(x.dtype)


class RMSNorm(LayerNorm):
    """RMS normalization over the last dim (arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight. 16-bit inputs are
    normalized in fp32."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_plus:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        assert self.weight is not None
        wide, weight = _one_plus(x, self.weight)
        return F.rms_norm(wide, self.shape, weight, self.eps).to(x.dtype)


def heads_norm_meta(name: str, heads: int, config: TransformerConfig) -> ParamMeta:
    """Return the `ParamMeta` of the weight of a query or key norm in which each head has its own weights. The shape is
    [heads * channels] if one norm covers the channels of all heads, or [heads, channels] if each head is normalized
    separately. The weight is sharded by heads.
    """
    widths = (heads, config.head_dim)
    shape = widths if config.qk_layernorm_scope == "each" else (prod(widths),)
    return ParamMeta(f"{name}.weight", shape, {"tp": 0}, role="norm")


class WideRMSNorm(nn.Module):
    """RMS normalization over the channels of all heads together. The heads are sharded over the tensor-parallel ranks.
    16-bit inputs are normalized in fp32."""

    def __init__(self, name: str, heads: int, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.size = heads * config.head_dim
        self.eps = config.norm_epsilon
        self.tp = ctx.tp
        self.one_plus = config.apply_layernorm_1p
        self.weight = make_parameter(heads_norm_meta(name, heads, config), ctx)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the heads of x: [s, b, heads/tp, d] -> [s, b, heads/tp, d]."""
        wide = x.float() if x.itemsize == 2 else x
        squares = wide.square().sum((-1, -2), keepdim=True)
        # Every rank uses the sum of squares over all ranks, so the backward pass must sum the gradient of this sum over
        # all ranks.
        squares = copy_to(reduce_from(squares, self.tp), self.tp)
        weight = self.weight.to(wide.dtype).view(x.shape[-2:])
        weight = weight + 1 if self.one_plus else weight
        return (wide * torch.rsqrt(squares / self.size + self.eps) * weight).to(x.dtype)


class NormOfEachHead(nn.Module):
    """Norm over the channels of each head, with separate weights for each head. 16-bit inputs are normalized in
    fp32."""

    def __init__(self, name: str, heads: int, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.centered = NORMALIZATIONS.facts(config.normalization).centered
        self.eps = config.norm_epsilon
        self.one_plus = config.apply_layernorm_1p
        self.weight = make_parameter(heads_norm_meta(name, heads, config), ctx)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the heads of x: [s, b, heads/tp, d] -> [s, b, heads/tp, d]."""
        wide, shape = x.float() if x.itemsize == 2 else x, x.shape[-1:]
        normed = F.layer_norm(wide, shape, eps=self.eps) if self.centered else F.rms_norm(wide, shape, eps=self.eps)
        return (normed * (self.weight.to(wide.dtype) + int(self.one_plus))).to(x.dtype)


class L2Norm(nn.Module):
    """RMS normalization over the last dim without weights: x / sqrt(mean(x^2) + eps). 16-bit inputs are normalized in
    fp32."""

    def __init__(self, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.eps, self.function = config.norm_epsilon, region(_divided_by_root_mean_square, ctx.compiled)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.eps)


def _divided_by_root_mean_square(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps)


def build_query_key_norms(name: str, config: TransformerConfig, ctx: TPContext) -> tuple[nn.Module, nn.Module]:
    """Return the query norm and the key norm of an attention layer. The inputs of both norms have the shape [s, b,
    heads/tp, d]. If the layer has no query and key norms, the function returns two `nn.Identity` modules.

    The caller applies the norms before the rotary embedding, or after it if --qk-layernorm-after-rotary is set. With
    --qk-l2-norm, the order does not affect the result.
    """
    if config.qk_l2_norm and config.layer(ctx.layer).rotation is not None:
        return L2Norm(config, ctx), L2Norm(config, ctx)
    if not config.qk_layernorm:
        return nn.Identity(), nn.Identity()
    queries, keys = f"{name}.q_layernorm", f"{name}.k_layernorm"
    if config.qk_layernorm_scope != "head":
        norm = WideRMSNorm if config.qk_layernorm_scope == "all" else NormOfEachHead
        return norm(queries, config.num_attention_heads, config, ctx), norm(keys, config.query_groups, config, ctx)
    return (
        build_norm(queries, config.head_dim, config, ctx, HEAD_NORM_PARTIAL_OVER),
        build_norm(keys, config.head_dim, config, ctx, HEAD_NORM_PARTIAL_OVER),
    )


def _one_plus(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and 1 + weight for --apply-layernorm-1p. If x is a 16-bit tensor, both are converted to fp32, because
    small weights would be lost if 1 were added in 16 bits."""
    wide = x.float() if x.itemsize == 2 else x
    return wide, weight.to(wide.dtype) + 1


def build_norm(
    name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over: tuple[str, ...] | None = None
) -> nn.Module:
    """Build a norm over `size` channels, of the kind that `config.normalization` selects.

    By default, `partial_over` is the value for norms of hidden states (see `sequence_partial`).

    Args:
        name: Prefix of the parameter names.
        size: Number of channels.
        config: The model.
        ctx: Tensor-parallel context of the layer that contains the norm.
        partial_over: Axes over whose ranks the weight gradient must be summed, as in `ParamMeta.partial_over`.
    """
    partial_over = sequence_partial(ctx.sequence_parallel) if partial_over is None else partial_over
    return NORMALIZATIONS.build(config.normalization, name, size, config, ctx, partial_over)
