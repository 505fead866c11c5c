"""Interfaces and registries for attention kernels and context-parallel attention. This module does not import torch.

@ATTENTION_BACKENDS.register("mine")
class MyBackend(TorchBackend):
    def causal(self) -> nn.Module: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron.core.registry import NoFacts, Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from megatron.core.attention.tile_kernels import Causal, Dropout, Kernel


@dataclass(frozen=True)
class AttentionOperands:
    """Scale, precision, device and head widths of one layer's attention."""

    scale: float
    """Factor by which attention scores are multiplied."""

    dtype: torch.dtype
    device: torch.device
    head_dim: int
    """Number of channels in a query or key head."""

    value_head_dim: int
    """Number of channels in a value head."""


class AttentionBackend(Protocol):
    """Interface that provides the attention kernels of one layer."""

    always_tiles: bool
    """True if the kernels returned by `tiles` also compute plain causal attention, in place of the module returned by
    `causal`."""

    def causal(self) -> nn.Module:
        """Return the module that computes causal attention among the tokens of one rank. The module has the same
        interface as `megatron.core.attention.core_attention.FusedAttention`."""

    def tiles(self) -> tuple[Kernel, Kernel]:
        """Return the kernels that compute attention tile by tile: the first for plain causal attention, the second for
        packed documents and sliding windows."""

    def dropout(self, dropout: Dropout) -> Kernel:
        """Return the kernel for attention with dropout. All attention kernels use the same dropout masks."""


class MakeBackend(Protocol):
    def __call__(self, operands: AttentionOperands) -> AttentionBackend: ...


ATTENTION_BACKENDS = Registry("--attention-backend", NoFacts, protocol=MakeBackend, makes=AttentionBackend)
"""Registry of classes with the interface of `AttentionBackend`. Derive a custom backend from
`megatron.core.attention.core_attention.TorchBackend`."""

_CORE = "megatron.core.attention.core_attention"
ATTENTION_BACKENDS.register("auto", f"{_CORE}:TorchBackend")
ATTENTION_BACKENDS.register("flash", f"{_CORE}:TorchBackend")
ATTENTION_BACKENDS.register("unfused", f"{_CORE}:Unfused")


class Ranks(Protocol):
    """Interface of the context-parallel axis, which is a `megatron.core.parallel_state.Axis`."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...


class ContextAttention(Protocol):
    """Function that computes causal attention over the tokens of all context-parallel ranks."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cp: Ranks, causal: Causal, sinks: Tensor | None = None, /
    ) -> Tensor:
        """Compute attention among the tokens of all context-parallel ranks: q [s/cp, b, heads, d], k [s/cp, b, groups,
        d], v [s/cp, b, groups, dv], sinks [heads] -> [s/cp, b, heads, dv]. Each rank must hold the tokens at the
        positions that `megatron.core.attention.tiles.rank_spans` returns for the rank."""


@dataclass(frozen=True)
class ContextParallelFacts:
    by_heads: bool = False
    """True if the attention divides heads among context-parallel ranks: each rank computes some of the heads for the
    whole sequence."""

    nested: bool = False
    """True if this attention arranges neighbouring context-parallel ranks in groups (`Axis.levels`). The heads are
    divided among the ranks of a group, and the queries are divided among the groups."""

    rules: Callable[..., Iterable[object]] | None = None
    """Validation rule for runs with more than one context-parallel rank. The rule is a function of (RunConfig, world
    size) that returns the `Problem`s of the run."""


CONTEXT_PARALLEL = Registry("--cp-comm-type", ContextParallelFacts, protocol=ContextAttention)
"""Registry that maps each choice of --cp-comm-type to an implementation of `ContextAttention`."""

CONTEXT_PARALLEL.register("p2p", "megatron.core.attention.context_parallel:ring_attention")
