"""Configuration of norms: their kinds and their positions in a layer. This module does not import torch.

To add a norm, register a class:

    @NORMALIZATIONS.register("my_norm")
    class MyNorm(nn.Module):
        def __init__(self, name: str, size: int, config: TransformerConfig, ctx: TPContext, partial_over) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron.core.config.flag_spec import Section, flag
from megatron.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class NormFacts:
    """Properties of a registered norm. The defaults of `NormFacts` describe a custom RMSNorm."""

    centered: bool = False
    """True if the norm subtracts the mean from its input, as LayerNorm does."""

    biased: bool = False
    """True if the norm has a bias by default."""

    standard: bool = False
    """True for the built-in LayerNorm and RMSNorm. Norms of attention heads, and conversions to other programs, support
    only LayerNorm and RMSNorm."""


class NormModule(Protocol):
    """Interface of a norm, which is an `nn.Module`."""

    def forward(self, x: Tensor, /) -> Tensor:
        """Normalize the last dim of x: [..., size] -> [..., size]."""


class Norm(Protocol):
    """Class or function that creates a norm over the last dim."""

    def __call__(self, name: str, size: int, config: Section, ctx: object, partial_over: tuple[str, ...]) -> nn.Module:
        """Create the norm.

        Args:
            name: Prefix of the parameter names.
            size: Number of channels.
            config: The layer's `TransformerConfig`.
            ctx: The layer's `megatron.core.tensor_parallel.layers.TPContext`.
            partial_over: Value of `ParamMeta.partial_over` for the norm's parameters, whose `ParamMeta.role` must be
                "norm".
        """


NORMALIZATIONS = Registry("--normalization", NormFacts, protocol=Norm, makes=NormModule)
"""Registry that maps each choice of --normalization to a `Norm`."""

_NORM = "megatron.core.transformer.norm"
NORMALIZATIONS.register("LayerNorm", f"{_NORM}:LayerNorm", centered=True, biased=True, standard=True)
NORMALIZATIONS.register("RMSNorm", f"{_NORM}:RMSNorm", standard=True)

NO_NORMS_OF_INPUTS = "--norm-placement output", "--norm-placement sum"
BUILT_IN_NORMS = "--normalization LayerNorm or --normalization RMSNorm; use one of these, or remove it"


@dataclass(frozen=True)
class NormConfig:
    """Configuration of the norms in the model's layers."""

    normalization: str = flag("LayerNorm", choices=NORMALIZATIONS, first_run=True)
    """Normalization before attention, before the MLP, and after the last layer."""

    norm_placement: str = flag("pre", choices=("pre", "output", "sandwich", "sum"))
    """Position of the norm in each sublayer: before it (pre), on its output before the residual addition (output, as
    in OLMo 2), both (sandwich, as in Gemma 3), or after the residual addition, without a final norm (sum, as in the
    first GPT)."""

    parallel_residual: bool = False
    """Compute attention and MLP of a layer from the same input, and add both outputs to the residual stream
    (GPT-NeoX)."""

    parallel_residual_shared_norm: bool = flag(
        False, no_effect_without="--parallel-residual", excludes=NO_NORMS_OF_INPUTS
    )
    """Use one input norm for both attention and MLP with --parallel-residual (GPT-J, Falcon, Command R)."""

    norm_parameters: str = flag("all", choices=("all", "weight", "none"), needs=BUILT_IN_NORMS)
    """Parameters of norms. all: a weight, and in LayerNorm a bias. weight: only a weight (Command R). none: no
    parameters (OLMo)."""

    apply_layernorm_1p: bool = flag(
        False, needs=BUILT_IN_NORMS, excludes="--norm-parameters none: the norms have no weights"
    )
    """In norms, multiply by 1 + weight instead of weight. The weights are initially 0."""

    norm_epsilon: float = flag(1e-5, "--layernorm-epsilon")
    """Epsilon that norms add to the variance."""

    @property
    def norms_inputs(self) -> bool:
        """True if a norm precedes each sublayer."""
        return self.norm_placement in ("pre", "sandwich")

    @property
    def norms_sums(self) -> bool:
        """True if a norm follows each addition to the residual stream."""
        return self.norm_placement == "sum"

    @property
    def norms_apart(self) -> bool:
        """True if the MLP has an input norm that is separate from the input norm of attention."""
        return self.norms_inputs and not (self.parallel_residual and self.parallel_residual_shared_norm)

    @property
    def norms_outputs(self) -> bool:
        """True if a norm follows each sublayer, before or after the residual addition."""
        return self.norm_placement != "pre"
