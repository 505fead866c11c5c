"""Specifications of tensor-parallel linear layers and their parameters, and the registry of the layers'
implementations.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from megatron.core.param_meta import Fused, Init, ParamMeta, Role
from megatron.core.registry import NoFacts, Registry

if TYPE_CHECKING:
    from torch import nn


def sequence_partial(sequence_parallel: bool) -> tuple[str, ...]:
    """Return the value of `ParamMeta.partial_over` for a replicated parameter that is used between tensor-parallel
    linear layers, such as the weight of a norm. The value lists the axes over whose ranks the gradient must be summed.

    Without sequence parallelism, every rank processes all tokens and computes the whole gradient. With sequence
    parallelism, each rank processes a shard of the sequence, and computes only this shard's contribution to the
    gradient.
    """
    return ("tp",) if sequence_parallel else ()


@dataclass(frozen=True)
class ColumnLinear:
    """Specification of a linear layer with sharded output features. The weight has the shape [*out_dims, in_size] and
    is sharded along `shard_dim`."""

    name: str
    in_size: int
    out_dims: tuple[int, ...]
    bias: bool
    shard_dim: int = 0
    fused: Fused | None = None
    """Description of the linear maps that the weight concatenates, such as query, key and value. None if the weight is
    a single linear map."""
    role: Role = "hidden"
    """`ParamMeta.role` of the weight."""
    init: Init | None = None
    """Initial values of the weight. None means the initial values that belong to the weight's role."""

    def metas(self, sequence_parallel: bool = False) -> list[ParamMeta]:
        """Return the metadata of the weight, and of the bias if there is one."""
        sharded = {"tp": self.shard_dim}
        shape = (*self.out_dims, self.in_size)
        weight = ParamMeta(
            f"{self.name}.weight",
            shape,
            sharded,
            self.init,
            role=self.role,
            fan_in=self.in_size,
            linear=True,
            fused=self.fused,
        )
        bias = ParamMeta(f"{self.name}.bias", self.out_dims, sharded, role="bias")
        return [weight, bias] if self.bias else [weight]


@dataclass(frozen=True)
class RowLinear:
    """Specification of a linear layer with sharded input features. The weight has the shape [out_size, in_size] and is
    sharded along its last dim. The bias is replicated on every rank."""

    name: str
    in_size: int
    out_size: int
    bias: bool
    role: Role = "hidden"
    """`ParamMeta.role` of the weight."""
    to_residual: bool = True
    """True if the output is added to the residual stream."""
    init: Init | None = None
    """Initial values of the weight. None means the initial values that belong to the weight's role."""

    sharded: ClassVar[Mapping[str, int]] = {"tp": 1}

    def metas(self, sequence_parallel: bool) -> list[ParamMeta]:
        """Return the metadata of the weight, and of the bias if there is one."""
        shape, partial_over = (self.out_size, self.in_size), sequence_partial(sequence_parallel)
        of_weight = () if self.sharded else partial_over
        weight = ParamMeta(
            f"{self.name}.weight",
            shape,
            self.sharded,
            self.init,
            of_weight,
            role=self.role,
            fan_in=self.in_size,
            to_residual=self.to_residual,
            linear=True,
        )
        bias = ParamMeta(f"{self.name}.bias", (self.out_size,), partial_over=partial_over, role="bias")
        return [weight, bias] if self.bias else [weight]


@dataclass(frozen=True)
class ReplicatedLinear(RowLinear):
    """Specification of a linear layer whose weight [out_size, in_size] is replicated on every rank. Each rank applies
    the layer to its own tokens.
    """

    to_residual: bool = False

    sharded: ClassVar[Mapping[str, int]] = {}


class MakeLinear(Protocol):
    """Interface of functions that build a tensor-parallel linear layer from its specification."""

    def __call__(self, linear: ColumnLinear | RowLinear, ctx: object) -> nn.Module:
        """Build the layer. `ctx` is the `TPContext` of the layer (`megatron.core.tensor_parallel.layers`)."""


LINEARS = Registry("linear layer", NoFacts, protocol=MakeLinear)
"""Registered implementations of `MakeLinear`, keyed by name. An implementation that replaces a built-in layer must
compute the same result with equivalent communication."""

LINEARS.register("column_parallel", "megatron.core.tensor_parallel.layers:ColumnParallelLinear")
LINEARS.register("row_parallel", "megatron.core.tensor_parallel.layers:RowParallelLinear")
