"""Bitwise comparison of replicated parameters and optimizer states between ranks (--check-replicas).

Parameters and optimizer state are replicated along the mesh axes that do not shard them. Each rank hashes its replicas
on the device. The replicas of a tensor along an axis are considered equal if the minimum of their hashes equals the
maximum. The comparison takes two small collectives per axis, regardless of the model size. If hashes differ, the ranks
exchange the values, to report which elements differ on which ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.collectives import all_reduce_, gather_objects
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import Axis, ParallelState
from megatron.extensions.observe.diagnosis.flags import DiagnosisConfig
from megatron.training.hooks import Callback, Log, Task
from megatron.training.run import TrainingRun

# 2^64 / golden ratio, rounded to an odd number and stored as a signed int64. Each hash multiplier is a multiple of this
# constant with the lowest bit set to 1.
_GOLDEN = -7046029254386353131
_CHUNK = 1 << 22


class ReplicaError(RuntimeError):
    """Raised if replicas differ between ranks."""


class ReplicaCheck(Callback):
    """Callback that compares all replicas every --check-replicas iterations, and stops the run if any differ."""

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        check = partial(check_replicas, run.stages.values(), run.optimizer, run.runtime.state)
        return (Task("check of replicas", self.config.options(DiagnosisConfig).check_replicas, check),)


@dataclass(frozen=True)
class Replica:
    """Tensor of this rank, and the mesh axes along which other ranks hold copies of the tensor."""

    label: str
    values: Tensor
    axes: tuple[str, ...]


def check_replicas(modules: Collection[nn.Module], optimizer: DistributedOptimizer, state: ParallelState) -> int:
    """Compare all replicas bit by bit, and return the number of compared tensors on this rank. This function is a
    collective over the world.

    Raises ReplicaError on every rank if replicas differ. The message contains the first tensor that differs, the ranks
    and the values.
    """
    optimizer.finish_param_sync()
    replicas = list(replicas_of(modules, optimizer, state))
    device = optimizer.ddp.device  # collectives run on this device, but optimizer states may be in host memory
    hashes = [bit_hash(replica.values).to(device) for replica in replicas]
    message = None
    for name in sorted({axis for replica in replicas for axis in replica.axes}):
        along = [i for i, replica in enumerate(replicas) if name in replica.axes]
        different = _different(torch.stack([hashes[i] for i in along]), state.axis(name))
        if different is not None and message is None:
            replica = replicas[along[different]]
            message = _describe(replace(replica, values=replica.values.to(device)), name, state)
    if messages := [found for found in gather_objects(message, state.world) if found is not None]:
        raise ReplicaError(messages[0])
    return len(replicas)


def replicas_of(
    modules: Collection[nn.Module], optimizer: DistributedOptimizer, state: ParallelState
) -> Iterator[Replica]:
    """Yield this rank's replicated parameters, followed by its replicated optimizer states. Ranks that hold copies of
    the same tensors yield them in the same order."""
    params: list[Any] = [param for module in modules for param in module.parameters()]
    parts = list(optimizer.ddp.sharded_params())
    sharded = {part.meta.name for part in parts}
    kept = [param for param in params if param.meta.name not in sharded]
    tensors = [(f"parameter {param.meta.name}", param.detach(), param.meta, True) for param in kept]
    tensors += [(f"parameter {part.meta.name}", part.data, part.meta, False) for part in parts]
    whole = not optimizer.config.use_distributed_optimizer
    states = (
        piece for piece in optimizer.sharded_state() if piece.own_shape is None
    )  # a state that has another shape than its parameter is not replicated
    tensors += [(f"{p.key} of {p.meta.name}", p.data, p.meta, whole) for p in states]
    for label, values, meta, data_replicated in tensors:
        axes = [*meta.replica_axes, meta.data_axis if data_replicated else f"{meta.data_axis}_copies"]
        if len(set(meta.shared_stages)) > 1:
            axes.append("embd")
        if axes := [axis for axis in axes if state.axis(axis).size > 1]:
            yield Replica(label, values, tuple(axes))


def bit_hash(x: Tensor) -> Tensor:
    """Hash a tensor to an int64 scalar: multiply the bits of each element by an odd number that depends on its
    position, and sum modulo 2^64. Changing any single bit changes the hash. The order of summation does not affect the
    hash.
    """
    bits = _bits(x)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        position = torch.arange(start, start + part.numel(), device=x.device)
        total += (part * (position * _GOLDEN | 1)).sum()
    return total


def _bits(x: Tensor) -> Tensor:
    """Return the elements of `x` as a 1-D tensor of integers that have the same bits. As integers, NaNs with equal bits
    compare as equal."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(-1).view(integers[x.element_size()])


def _different(hashes: Tensor, axis: Axis) -> int | None:
    """Return the index of the first hash that differs between ranks of the axis; None if all ranks of the axis have
    equal hashes."""
    low, high = (all_reduce_(hashes.clone(), axis, op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
    places = (low != high).nonzero()
    return int(places[0]) if len(places) else None


def _describe(replica: Replica, name: str, state: ParallelState) -> str:
    """Return a message that names the elements of a replica that differ between the ranks of an axis. This function is
    a collective over the axis. All ranks along the axis call it, because they have compared the same hashes."""
    axis = state.axis(name)
    values = replica.values.contiguous().view(-1)
    copies = [torch.empty_like(values) for _ in axis.ranks]
    dist.all_gather(copies, values, group=axis.group)
    unequal = torch.stack([_bits(copy) != _bits(copies[0]) for copy in copies]).any(dim=0)
    index = int(unequal.nonzero()[0])
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), replica.values.shape))
    shown = ", ".join(f"rank {rank}: {copy[index].item()!r}" for rank, copy in zip(axis.ranks, copies, strict=True))
    return (
        f"{replica.label} should be equal along {name}, but is not: {int(unequal.sum())} of {values.numel()} elements "
        f"differ, the first at {place} of the local tensor: {shown}. Ranks have diverged: resume from an earlier "
        "checkpoint, and check how this tensor's gradient is reduced"
    )
