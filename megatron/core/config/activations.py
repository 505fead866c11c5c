"""Registry of the activation functions of MLPs and experts, which are the choices of --activation-func. This module
does not import torch.

@ACTIVATIONS.register("my_gate", gated=True)
class MyGate(nn.Module):
    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron.core.config.flag_spec import Section
from megatron.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ActivationFacts:
    """Properties of an activation function."""

    gated: bool = False
    """True if the function is gated, so that it maps [..., 2f] to [..., f]. The first half of the input of a gated
    function contains the gates. Functions that are not gated keep the width."""

    bounded: bool = False
    """True if the function supports --activation-func-clamp-value and --glu-linear-offset."""


class Activation(Protocol):
    """An activation function, which may be an `nn.Module`."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Apply the function to x [..., f], or to x [..., 2f] if the function is gated. The result is [..., f], where f
        is this rank's part of the MLP's width."""


class MakeActivation(Protocol):
    """Class or function that creates the activation function between the two linear layers of an MLP, or of a layer's
    experts."""

    def __call__(self, name: str, config: Section, ctx: object) -> Activation:
        """Create the activation function. The names of the function's parameters must begin with `name`. The
        `ParamMeta` of each parameter needs `partial_over=("tp",)`: each tensor-parallel rank computes a part of the
        MLP's width, so the gradient on a rank is a partial sum. `config` is the layer's `TransformerConfig`, and `ctx`
        is the layer's `megatron.core.tensor_parallel.layers.TPContext`."""


ACTIVATIONS = Registry("--activation-func", ActivationFacts, protocol=MakeActivation)
"""Registry that maps each choice of --activation-func to a `MakeActivation`."""

_ACTIVATIONS = "megatron.core.transformer.activations"
for _plain in ("gelu", "gelu_tanh", "relu", "squared_relu"):
    ACTIVATIONS.register(_plain, f"{_ACTIVATIONS}:build_plain")
for _gated in ("swiglu", "geglu", "geglu_tanh", "quick_geglu"):
    ACTIVATIONS.register(_gated, f"{_ACTIVATIONS}:build_gated", gated=True, bounded=True)
