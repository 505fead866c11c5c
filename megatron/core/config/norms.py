"""Where norms are in a layer, and what they are. No torch.

A norm of one's own is a class beside one line:

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
    """Facts about a norm. The defaults are those of an RMSNorm of one's own."""

    centered: bool = False
    """Whether it subtracts the mean."""

    biased: bool = False
    """Whether it has a bias by default."""

    standard: bool = False
    """Whether it is the library's LayerNorm or RMSNorm, which norms of single heads and other programs compute too."""


class NormModule(Protocol):
    """What a norm makes, an `nn.Module`."""

    def forward(self, x: Tensor, /) -> Tensor:
        """x [..., size] -> [..., size]"""


class Norm(Protocol):
    """Makes a norm over the last dim."""

    def __call__(self, name: str, size: int, config: Section, ctx: object, partial_over: tuple[str, ...]) -> nn.Module:
        """`name` begins the names of its parameters, which have the role "norm" and this `partial_over` in their
        `ParamMeta`. `size` is the number of channels, `config` the layer's `TransformerConfig`, and `ctx` its
        `megatron.core.tensor_parallel.layers.TPContext`."""


NORMALIZATIONS = Registry("--normalization", NormFacts, protocol=Norm, makes=NormModule)
"""Name -> `Norm`."""

_NORM = "megatron.core.transformer.norm"
NORMALIZATIONS.register("LayerNorm", f"{_NORM}:LayerNorm", centered=True, biased=True, standard=True)
NORMALIZATIONS.register("RMSNorm", f"{_NORM}:RMSNorm", standard=True)

NO_NORMS_OF_INPUTS = "--norm-placement output", "--norm-placement sum"
BUILT_IN_NORMS = "--normalization LayerNorm or --normalization RMSNorm; use one of these, or remove it"


@dataclass(frozen=True)
class NormConfig:
    """Settings of the norms of layers."""

    normalization: str = flag("LayerNorm", choices=NORMALIZATIONS, first_run=True)
    """Normalization before attention, before the MLP, and after the last layer."""

    norm_placement: str = flag("pre", choices=("pre", "output", "sandwich", "sum"))
    """Norms of each sublayer: of its input (pre), of its output before it is added to the residual stream (output, as
    OLMo 2 has it), of both (sandwich, as Gemma 3 has it), or of the stream behind the addition, without a norm behind
    the last layer (sum, as the first GPT has it)."""

    parallel_residual: bool = False
    """Attention and MLP of a layer read the same input and their outputs are added to it together (GPT-NeoX)."""

    parallel_residual_shared_norm: bool = flag(
        False, no_effect_without="--parallel-residual", excludes=NO_NORMS_OF_INPUTS
    )
    """One norm of the input of attention and MLP of a layer with --parallel-residual (GPT-J, Falcon, Command R)."""

    norm_parameters: str = flag("all", choices=("all", "weight", "none"), needs=BUILT_IN_NORMS)
    """Parameters of norms: a weight and, in LayerNorm, a bias (all), a weight alone (weight, as in Command R), or none
    (OLMo)."""

    apply_layernorm_1p: bool = flag(
        False, needs=BUILT_IN_NORMS, excludes="--norm-parameters none: there are no weights"
    )
    """Multiply by 1 + weight in norms, whose weights start at 0."""

    norm_epsilon: float = flag(1e-5, "--layernorm-epsilon")
    """Added to the variance in norms."""

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
        """True if the MLP has a norm of its input, beside that of attention."""
        return self.norms_inputs and not (self.parallel_residual and self.parallel_residual_shared_norm)

    @property
    def norms_outputs(self) -> bool:
        """Whether a norm follows each sublayer, before or behind the addition."""
        return self.norm_placement != "pre"
