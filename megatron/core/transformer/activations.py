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


def build_geglu(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    return partial(gated, kind="geglu", compiled=ctx.compiled)


def build_geglu_tanh(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    return partial(gated, kind="geglu_tanh", compiled=ctx.compiled)


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


def _geglu_forward(x: Tensor, approximate: str) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def _geglu_backward(x: Tensor, grad: Tensor, approximate: str) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    of_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=approximate)
    return torch.cat((of_gate, grad * F.gelu(gate, approximate=approximate)), dim=-1)


GATED: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "swiglu": (_swiglu_forward, _swiglu_backward),
    "geglu": tuple(partial(f, approximate="none") for f in (_geglu_forward, _geglu_backward)),
    "geglu_tanh": tuple(partial(f, approximate="tanh") for f in (_geglu_forward, _geglu_backward)),
}
"""Gated activation function -> forward(x) and backward(x, gradient of the output)."""


class _GatedFunction(torch.autograd.Function):
    """f(gate) * up that saves only its input for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, compiled: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.compiled = kind, compiled
        return region(GATED[kind][0], compiled)(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return region(GATED[ctx.kind][1], ctx.compiled)(x, grad), None, None


def gated(x: Tensor, kind: str, compiled: bool = False) -> Tensor:
    """x [..., 2f], gate before up -> [..., f] (arXiv:2002.05202)"""
    return _GatedFunction.apply(x, kind, compiled)


def swiglu(x: Tensor, compiled: bool = False) -> Tensor:
    """SiLU(gate) * up; x [..., 2f] -> [..., f]"""
    return gated(x, "swiglu", compiled)
