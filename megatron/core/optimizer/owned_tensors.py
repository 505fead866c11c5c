"""Tensors that contain one element for each parameter element that the rank updates. Examples are the weights
themselves, states of callbacks, and weights that are used only for evaluation.

These tensors are sharded like optimizer states, so checkpoints that contain them can be loaded under any parallel
layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece, pieces_by_name
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def owned_weights(ddp: DistributedDataParallel) -> Iterator[OptimizerPiece]:
    """Yield views of the model parameter elements that this rank updates. Writing to a view changes the model
    parameters."""
    for bucket in ddp.buckets:
        first = bucket.owned_range[0]
        for piece in bucket.owned_pieces:
            data = bucket.owned_params[piece.offset - first : piece.offset - first + piece.stop - piece.start]
            yield OptimizerPiece("weight", piece.meta, data, piece.start, piece.stop)


def with_main_weights(
    optimizer: DistributedOptimizer, pieces: Iterable[OptimizerPiece]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors (values, main weights), both of shape [n], for the same n parameter elements. `pieces`
    contains tensors such as callback states, for parameter elements that this rank updates, in any order. The values
    are views of the data of `pieces` and may be modified in place. The main weights are on the same device and must
    only be read. Under --bf16 and --fp16, they are fp32.
    """
    if any(shard.on_host for shard in optimizer.shards):
        optimizer.finish_param_sync()  # wait until the host has updated the shards in host memory
    by_name = pieces_by_name(pieces)
    for shard in optimizer.shards:
        for part, span in shard.owned_pieces(*shard.range):
            main = shard.read_main(span.start, span.stop)
            for piece in by_name.get(part.meta.name, ()):
                start, stop = max(piece.start, part.start), min(piece.stop, part.stop)
                if start < stop:
                    target = piece.data[start - piece.start : stop - piece.start]
                    yield target, main[start - part.start : stop - part.start].to(target.device)


def owned_zeros(
    ddp: DistributedDataParallel, names: Sequence[str], dtype: str | None = None, on_host: bool = False
) -> list[OptimizerPiece]:
    """For each name in `names`, allocate a zero-initialized state with one element for each element of `owned_weights`,
    and return the pieces of all states.

    The allocated memory includes the padding of the buckets. Memory planning counts this padding as well.

    Args:
        ddp: The wrapper that holds the parameters of the rank.
        names: Names of the states.
        dtype: Name of the dtype. The default is the main dtype.
        on_host: Whether to allocate the states in host memory.
    """
    kind = ddp.main_dtype if dtype is None else getattr(torch, dtype)
    found = []
    for name in names:
        for bucket in ddp.buckets:
            first = bucket.owned_range[0]
            device = "cpu" if on_host else bucket.device
            memory = torch.zeros(bucket.owned_params.shape, dtype=kind, device=device)
            for piece in bucket.owned_pieces:
                data = memory[piece.offset - first : piece.offset - first + piece.stop - piece.start]
                found.append(OptimizerPiece(name, piece.meta, data, piece.start, piece.stop))
    return found


@contextmanager
def other_weights(optimizer: DistributedOptimizer, offered: Iterable[OptimizerPiece]) -> Iterator[None]:
    """Context manager that sets the model parameters to the values of `offered`, rounded to the dtype of the
    parameters. At the end of the block, the parameters are restored exactly.

    `offered` contains new values for elements that this rank updates, as pieces on any device. Elements for which no
    rank offers a value keep their values. Within the block, forward passes are allowed, but optimizer steps are not.
    All data-parallel ranks must enter the context together. The context manager allocates memory for a copy of the
    replaced parameter elements that this rank updates.
    """
    optimizer.finish_param_sync()
    by_name = pieces_by_name(offered)
    owned = [weight for weight in owned_weights(optimizer.ddp) if weight.meta.name in by_name]
    kept = [weight.data.clone() for weight in owned]
    for weight in owned:
        for piece in by_name[weight.meta.name]:
            _copy_common(piece, weight)
    _spread(optimizer.ddp)
    try:
        yield
    finally:
        for weight, before in zip(owned, kept, strict=True):
            weight.data.copy_(before)
        _spread(optimizer.ddp)


def _copy_common(source: OptimizerPiece, target: OptimizerPiece) -> None:
    """Copy the elements that are in both pieces from `source` to `target`."""
    start, stop = max(source.start, target.start), min(source.stop, target.stop)
    if start < stop:
        values = source.data[start - source.start : stop - source.start]
        target.data[start - target.start : stop - target.start].copy_(values)


def _spread(ddp: DistributedDataParallel) -> None:
    """All-gather the parameters, so that every data-parallel rank receives the weights that the other data-parallel
    ranks have changed."""
    ddp.start_param_sync()
    ddp.finish_param_sync()
