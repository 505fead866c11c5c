"""Implementations of activation functions for MLPs and experts.

The functions that build activation functions have the arguments (name, config, ctx). An activation function that has
parameters is a module, and the names of its parameters begin with `name`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region
from megatron.core.config.activations import ACTIVATIONS, Activation
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.torch_private import AutogradContext

PARTIAL_SUMS = 32
"""Number of row groups over which bias gradients are summed separately. The separate sums give a GPU enough parallel
work even if the bias has few elements."""


class Bounded(NamedTuple):
    """Variant of a gated function of `FUNCTIONS` with clamped operands and an offset, as in gpt-oss: f(min(gate,
    clamp)) * (min(max(up, -clamp), clamp) + offset)."""

    name: str
    clamp: float | None
    offset: float


Kind = str | Bounded
"""Activation function: a key of `FUNCTIONS`, or a `Bounded` variant."""


class FusedActivation:
    """Activation function that saves only its input for the backward pass. `kind` selects the function (see
    `functions_of`). The function can also add the bias of the preceding linear layer to its input. If the function is
    compiled, a single kernel then computes the gradients of the input and of the bias.
    """

    def __init__(self, kind: Kind, compiled: bool) -> None:
        self.kind, self.compiled = kind, compiled

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute f(x + bias): x [..., n] -> [..., n], or [..., n / 2] for a gated function. The bias may have any
        shape with n elements."""
        return _ActivationFunction.apply(x, None if bias is None else bias.flatten(), self.kind, self.compiled)


def build_activation(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    """Build the activation function that `config` selects. The names of the function's parameters begin with `name`.
    The output of a gated function is half as wide as its input."""
    return ACTIVATIONS[config.activation](name, config, ctx)


def build_plain(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    """Build one of the ungated activation functions in `FUNCTIONS`. The output is as wide as the input."""
    kind = config.activation
    return FusedActivation(kind, True) if ctx.compiled else FUNCTIONS[kind][0]


def build_gated(name: str, config: TransformerConfig, ctx: TPContext) -> Activation:
    """Build a gated activation function from `FUNCTIONS`, with the clamp of --activation-func-clamp-value and the
    offset of --glu-linear-offset."""
    kind = config.activation
    clamp = config.activation_func_clamp_value
    offset = config.glu_linear_offset
    plain = clamp is None and offset == 0
    return FusedActivation(kind if plain else Bounded(kind, clamp, offset), ctx.compiled)


def gelu_tanh(x: Tensor) -> Tensor:
    """Tanh approximation of GeLU (arXiv:1606.08415, section 2), as in GPT-2."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """Squared ReLU, relu(x)^2 (arXiv:2109.08668)."""
    return F.relu(x).square()


def _gelu_backward(x: Tensor, grad: Tensor, approximate: str) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


def _relu_backward(x: Tensor, grad: Tensor) -> Tensor:
    return grad * (x > 0)


def _squared_relu_backward(x: Tensor, grad: Tensor) -> Tensor:
    return grad * F.relu(x) * 2


def _silu_backward(x: Tensor, grad: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(grad, x)


Functions = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]


def _gated_by(plain: Functions) -> Functions:
    """Return the gated version f(gate) * up of an activation function f, which must not be gated itself."""
    forward, backward = plain

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return forward(gate) * up

    def gradient(x: Tensor, grad: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.cat((backward(gate, grad * up), grad * forward(gate)), dim=-1)

    return gated, gradient


QUICK = 1.702
"""Factor of quick GeLU, x * sigmoid(1.702 x) (arXiv:1606.08415, section 2)."""


def _quick_geglu_forward(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(QUICK * gate) * up


def _quick_geglu_backward(x: Tensor, grad: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    share = torch.sigmoid(QUICK * gate)
    return torch.cat((grad * up * share * (1 + QUICK * gate * (1 - share)), grad * gate * share), dim=-1)


GELU: Functions = (F.gelu, partial(_gelu_backward, approximate="none"))
GELU_TANH: Functions = (gelu_tanh, partial(_gelu_backward, approximate="tanh"))

FUNCTIONS: dict[str, Functions] = {
    "identity": (lambda x: x, lambda x, grad: grad),
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "relu": (F.relu, _relu_backward),
    "squared_relu": (squared_relu, _squared_relu_backward),
    "swiglu": _gated_by((F.silu, _silu_backward)),
    "geglu": _gated_by(GELU),
    "geglu_tanh": _gated_by(GELU_TANH),
    "quick_geglu": (_quick_geglu_forward, _quick_geglu_backward),
}
"""Pairs of functions forward(x) and backward(x, output gradient), keyed by the name of the activation function."""


def functions_of(kind: Kind) -> Functions:
    """Return the functions forward(x) and backward(x, output gradient) of an activation function."""
    if isinstance(kind, str):
        return FUNCTIONS[kind]
    (forward, backward) = FUNCTIONS[kind.name]
    clamp = kind.clamp
    offset = kind.offset

    def of_bounded(x: Tensor) -> Tensor:
        return forward(_bounded(x, clamp, offset))

    def gradient(x: Tensor, grad: Tensor) -> Tensor:
        dx = backward(_bounded(x, clamp, offset), grad)
        return dx if clamp is None else dx * _within(x, clamp)

    return of_bounded, gradient


_regions_of = cache(functions_of)
"""Cached version of `functions_of`, which always returns the same function objects, so that each function is compiled
only once."""


def _bounded(x: Tensor, clamp: float | None, offset: float) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return torch.cat((gate, up + offset), dim=-1)


def _within(x: Tensor, clamp: float) -> Tensor:
    """Return a mask that is True for the elements of x that the clamp does not change. The gradient of all other
    elements is zero."""
    gate, up = x.chunk(2, dim=-1)
    return torch.cat((gate <= clamp, up.abs() <= clamp), dim=-1)


def _biased_forward(x: Tensor, bias: Tensor, kind: Kind) -> Tensor:
    return functions_of(kind)[0](x + bias)


def _biased_backward(x: Tensor, bias: Tensor, grad: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x [groups, rows per group, n] and of the bias. torch.compile fuses both computations
    into one kernel only if the rows of x are divided into groups.
    """
    dx = functions_of(kind)[1](x + bias, grad)
    wide = torch.promote_types(dx.dtype, torch.float32)
    return dx, dx.sum(1, dtype=wide).sum(0).to(bias.dtype)


class _ActivationContext(AutogradContext):
    kind: Kind
    compiled: bool


class _ActivationFunction(torch.autograd.Function):
    """Autograd function that computes f(x + bias). Only x and the bias are saved for the backward pass."""

    @staticmethod
    def forward(ctx: _ActivationContext, x: Tensor, bias: Tensor | None, kind: Kind, compiled: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.kind, ctx.compiled = kind, compiled
        if bias is None:
            return region(_regions_of(kind)[0], compiled)(x)
        return region(_biased_forward, compiled)(x, bias, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ActivationContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        if bias is None:
            return region(_regions_of(ctx.kind)[1], ctx.compiled)(x, grad), None, None, None
        groups = gcd(x.numel() // x.shape[-1], PARTIAL_SUMS)
        x_rows, grad_rows = (rows.reshape(groups, -1, rows.shape[-1]) for rows in (x, grad))
        dx, of_bias = region(_biased_backward, ctx.compiled)(x_rows, bias, grad_rows, ctx.kind)
        return dx.view(x.shape), of_bias, None, None
