"""Tensors with one element for each parameter element that a rank updates. Examples are the weights themselves, states
of callbacks, and weights that are used only for evaluation.

Tensors of this kind are sharded in the same way as optimizer states, so their checkpoints can be loaded under any
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
    """Return live views of the trained parameter elements that this rank updates, in the parameters' dtype."""
    for bucket in ddp.buckets:
        first = bucket.owned_range[0]
        for piece in bucket.owned_pieces:
            data = bucket.owned_params[piece.offset - first : piece.offset - first + piece.stop - piece.start]
            yield OptimizerPiece("weight", piece.meta, data, piece.start, piece.stop)


def with_main_weights(
    optimizer: DistributedOptimizer, pieces: Iterable[OptimizerPiece]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors [n] that belong to the same parameter elements. The first tensor of a pair contains values
    of `pieces`, and may be written in place. The second tensor of a pair contains the main weights, and must only be
    read. Both tensors of a pair are on the same device. Main weights are fp32 under --bf16 and --fp16. `pieces` are
    elements that this rank updates, in any order, such as callback states.
    """
    if any(shard.on_host for shard in optimizer.shards):
        optimizer.finish_param_sync()  # wait until the host has updated its shards
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
    """For each name in `names`, allocate a state of zeros with the elements of `owned_weights`, and return the pieces.

    The allocated memory includes the padding of the buckets, which memory plans count as well.

    Args:
        ddp: Parameters of the rank.
        names: Names of the states.
        dtype: Name of the dtype; the default is the main dtype.
        on_host: Allocate host memory.
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
    """Set the parameters to the values of `offered` within the block. Values are rounded to the dtype of the
    parameters.

    After the block, the parameters have exactly their previous values. Parameter elements that are in no rank's
    `offered` keep their values. `offered` contains new values of elements that this rank updates, as pieces on any
    device. Within the block, forward passes are allowed, but updates are not. All data-parallel ranks must enter the
    context together. The context manager allocates memory for a copy of `owned_weights`.
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
    """Copy the elements that both pieces contain from `source` to `target`."""
    start, stop = max(source.start, target.start), min(source.stop, target.stop)
    if start < stop:
        values = source.data[start - source.start : stop - source.start]
        target.data[start - target.start : stop - target.start].copy_(values)


def _spread(ddp: DistributedDataParallel) -> None:
    """Broadcast the weights that one data-parallel rank has written to all other data-parallel ranks."""
    ddp.start_param_sync()
    ddp.finish_param_sync()
