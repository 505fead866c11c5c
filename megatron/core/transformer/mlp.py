"""The feed-forward half of a layer: column-parallel, activation, row-parallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init
from megatron.core.regions import region
from megatron.core.tensor_parallel.comm_overlap import column_parallel, row_parallel
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.recompute import recomputed, with_input_recomputed


def _swiglu_forward(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_backward(x: Tensor, grad: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)


class _SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, of which only the input is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.compiled = compiled
        return region(_swiglu_forward, compiled)(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return region(_swiglu_backward, ctx.compiled)(x, grad), None


def swiglu(x: Tensor, compiled: bool = False) -> Tensor:
    """x [..., 2f], gate before up -> [..., f] (arXiv:2002.05202)"""
    return _SwiGLUFunction.apply(x, compiled)


def gelu(x: Tensor) -> Tensor:
    """GeLU in its tanh form, as GPT-2 has it and as Megatron-LM's fused bias-gelu, its default, computes it."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (arXiv:2109.08668)"""
    return F.relu(x).square()


def build_activation(config: TransformerConfig, ctx: TPContext) -> Callable[[Tensor], Tensor]:
    """The activation function of the model; gated ones halve the width."""
    if config.activation == "swiglu":
        return partial(swiglu, compiled=ctx.compiled)
    if config.activation == "squared_relu":
        return region(squared_relu, ctx.compiled)
    return gelu


def recomputes_activation(config: TransformerConfig) -> bool:
    """Whether the activation function alone is computed again: not where the whole MLP is."""
    return "mlp_act" in config.recomputed_modules and "mlp" not in config.recomputed_modules


class MLP(nn.Module):
    """fc2(activation(fc1(x))). A gated fc1 stacks gate and up as [2, ffn, h], each cut over the ranks."""

    def __init__(
        self,
        name: str,
        config: TransformerConfig,
        ctx: TPContext,
        init: Init,
        output_init: Init,
        ffn_size: int | None = None,
    ) -> None:
        super().__init__()
        hidden, ffn, bias = config.hidden_size, ffn_size or config.ffn_size, config.add_bias_linear
        out_dims, shard_dim = ((2, ffn), 1) if config.swiglu else ((ffn,), 0)
        self.linear_fc1 = column_parallel(ctx)(
            f"{name}.linear_fc1", hidden, out_dims, ctx, shard_dim=shard_dim, bias=bias, init=init
        )
        self.activation = build_activation(config, ctx)
        self.linear_fc2 = row_parallel(ctx)(f"{name}.linear_fc2", ffn, hidden, ctx, bias=bias, init=output_init)
        self.recompute = "mlp" in config.recomputed_modules
        self.recompute_activation = recomputes_activation(config)

    def forward(self, x: Tensor, context: BatchContext | None = None) -> Tensor:
        """x [s, b, h] -> [s, b, h]; [s/tp, b, h] under sequence parallelism"""
        return recomputed(self._run, x) if self.recompute and self.training else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        x = self.linear_fc1(x)
        if self.recompute_activation and self.training:
            return with_input_recomputed(self.activation, x, self.linear_fc2)
        return self.linear_fc2(self.activation(x))
