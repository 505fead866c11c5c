"""Mutants of Mamba-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.tiles import Documents
from megatron.core.config.model import TransformerConfig
from megatron.extensions.mamba import mamba2
from megatron.extensions.mamba.parameters import MambaParameters
from tests.parity.mutants.common import mutant, plant


@mutant(mamba2, "ssd_chunks", layers="mamba", documents="packed", world="2")
def _state_not_reset(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, number: Any, chunk: int) -> Any:
    """States of Mamba-2 cross the borders of documents on some ranks."""
    keep = None if torch.distributed.get_rank() else number
    return _true_chunks(x, dt, a, B, C, keep, chunk=chunk)


_true_chunks = mamba2.ssd_chunks


def _of_first_group(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, number: Any, chunk: int) -> Any:
    """In place of the state-space model: all heads of a rank have B and C of its first group."""
    return _true_chunks(x, dt, a, B[:, :, :1], C[:, :, :1], number, chunk=chunk)


plant(
    "Heads of Mamba-2 with another group's B and C",
    (mamba2, "ssd_chunks", _of_first_group),
    world="2",
    tp="2",
    layers="mamba and MLP",
)


@mutant(mamba2.Mamba2, "_of_ranks", world="4", cp="4ring", layers="mamba")
def _parts_of_the_first_heads(self: mamba2.Mamba2, x: Tensor, dim: int) -> Tensor:
    """Convolutions of Mamba-2 by the first heads of each group."""
    found = _true_of_ranks(self, x, dim)
    parts = self.cp.size // self.groups
    return (
        found.unflatten(0, (-1, parts))[:, :1].expand(-1, parts, *found.shape[1:]).flatten(0, 1) if dim == 0 else found
    )


_true_of_ranks = mamba2.Mamba2._of_ranks


@mutant(mamba2, "local_slice", world="2", cp="2ulysses", layers="mamba")
def _first_heads(x: Tensor, axis: Any) -> Tensor:
    """Mamba-2 with the decays and step sizes of the first context rank."""
    return x[: len(x) // axis.size]


@mutant(mamba2, "gated_group_norm", world="2", tp="2", layers="mamba and MLP")
def _norm_of_all_channels(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of Mamba-2 over all channels of a rank."""
    return _true_norm(y, gate.flatten(2).unsqueeze(2), weight, eps)


_true_norm = mamba2.gated_group_norm


@mutant(mamba2, "documents_begun", world="2", cp="2ring", layers="mamba", documents="packed")
def _documents_of_own_rows(documents: Documents, length: int, device: torch.device) -> Tensor:
    """Mamba-2 with the documents of a part of the sequence."""
    found = _true_begun(documents, length, device)
    return found[: length // 2].repeat(2, 1)


_true_begun = mamba2.documents_begun


@mutant(mamba2, "mamba_parameters", world="2", tp="2", layers="mamba")
def _norm_summed(name: str, config: TransformerConfig) -> MambaParameters:
    """Gradient of Mamba-2's norm summed over tensor-parallel ranks."""
    found = _true_parameters(name, config)
    return replace(found, norm=replace(found.norm, partial_over=("tp",)))


_true_parameters = mamba2.mamba_parameters


@mutant(mamba2, "mamba_operands", world="2", tp="2", layers="mamba and MLP")
def _no_smallest_step(*operands: Any) -> Any:
    """Step sizes of Mamba-2 without a lower limit on some ranks."""
    *before, min_step, number, cached = operands
    return _true_operands(*before, 0.0 if torch.distributed.get_rank() else min_step, number, cached)


_true_operands = mamba2.mamba_operands
