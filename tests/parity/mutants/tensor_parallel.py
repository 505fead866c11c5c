"""Mutants of tensor and sequence parallelism."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core import collectives as mappings
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel import cross_entropy, layers
from megatron.core.tensor_parallel.parameters import ReplicatedLinear
from tests.parity.mutants.common import Patch, mutant, nothing, plant


@mutant(ReplicatedLinear, "metas", world="2", tp="2", heads="mla", style="llama")
def _partial_at_every_layout(self: ReplicatedLinear, sequence_parallel: bool) -> list[ParamMeta]:
    """Gradients of projections to latents counted tp times."""
    return _true_metas(self, sequence_parallel=True)


@mutant(ReplicatedLinear, "metas", world="2", tp="2sp", mlp="moe", routing="groups")
def _partial_at_no_layout(self: ReplicatedLinear, sequence_parallel: bool) -> list[ParamMeta]:
    """Projections to latents of experts not summed over tp."""
    return _true_metas(self, sequence_parallel=False)


_true_metas = ReplicatedLinear.metas


def _slice_rows(x: Tensor, axis: Axis) -> collectives.Pending:
    """In place of a reduce-scatter: this rank's rows, without the other ranks' part of the sum."""
    return collectives.Pending(mappings.local_slice(x, axis).contiguous())


def _without_reduction(name: str) -> Patch:
    """A layer boundary whose entry in the backward, or whose exit in the forward, does not reduce."""
    boundary = getattr(layers, name)
    plain = _slice_rows if "SEQUENCE" in name else collectives.start_nothing
    broken = {"enter_adjoint": plain} if name.startswith("COLUMN") else {"leave": plain}
    return layers, name, replace(boundary, **broken)


@mutant(cross_entropy, "all_gather", world="2", tp="2")
def _local_stats_only(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Cross entropy over the local vocabulary only."""
    return torch.cat([x] * axis.size, dim)


plant("Row-parallel forward all-reduce dropped", _without_reduction("ROW"), world="2", tp="2")
plant("Column-parallel backward all-reduce dropped", _without_reduction("COLUMN"), world="2", tp="2")
plant(
    "Sequence-parallel forward reduce-scatter takes its own part",
    _without_reduction("ROW_SEQUENCE"),
    world="2",
    tp="2sp",
)
plant(
    "Sequence-parallel backward reduce-scatter takes its own part",
    _without_reduction("COLUMN_SEQUENCE"),
    world="2",
    tp="2sp",
)
plant("Partial gradients of norms not summed over tp", (finalize, "_sum_partial_grads", nothing), world="2", tp="2sp")
