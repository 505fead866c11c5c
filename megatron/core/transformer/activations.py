"""Activation functions of MLPs and experts.

Each is built by `build_*(name, config, ctx)`; one with parameters of its own is a module that makes them under `name`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.parts import ACTIVATIONS
from megatron.core.tensor_parallel.layers import TPContext

Activation = Callable[[Tensor], Tensor]


def build_activation(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    """The model's activation function, its parameters under `name`. Gated ones halve the width."""
    return ACTIVATIONS[config.activation](name, config, ctx)


def build_gelu(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    return F.gelu


def build_gelu_tanh(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    return gelu_tanh


def build_squared_relu(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    return region(squared_relu, ctx.compiled)


def build_swiglu(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    return partial(swiglu, compiled=ctx.compiled)


def gelu_tanh(x: Tensor) -> Tensor:
    """Tanh approximation of GeLU (arXiv:1606.08415, section 2), as in GPT-2."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (arXiv:2109.08668)"""
    return F.relu(x).square()


def _swiglu_forward(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_backward(x: Tensor, grad: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)


class _SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up that saves only its input for the backward."""

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
