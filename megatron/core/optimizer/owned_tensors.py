"""Tensors with an element for each parameter element that a rank updates: weights, states of callbacks, other weights
to evaluate with. They are divided as the optimizer's states are, so that checkpoints load at any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece, pieces_by_name
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def owned_weights(ddp: DistributedDataParallel) -> Iterator[OptimizerPiece]:
    """Live views of the trained parameters' elements that this rank updates, in the dtype of the parameters."""
    for bucket in ddp.buckets:
        first = bucket.owned_range[0]
        for piece in bucket.owned_pieces:
            data = bucket.owned_params[piece.offset - first : piece.offset - first + piece.stop - piece.start]
            yield OptimizerPiece("weight", piece.meta, data, piece.start, piece.stop)


def with_main_weights(
    optimizer: DistributedOptimizer, pieces: Iterable[OptimizerPiece]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (elements of `pieces` [n], to write in place; main weights of the same elements [n], to read), on the same
    device, for all trained parameters: fp32 under --bf16 and --fp16, as the optimizer updates them.

    `pieces` are of elements that this rank updates, in any order, such as the states of a callback."""
    if any(shard.on_host for shard in optimizer.shards):
        optimizer.finish_param_sync()  # the host has updated its part
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
    """For each of `names`, zeros for the elements of `owned_weights`: in the dtype named `dtype`, by default the main
    dtype, on the device or in host memory. The memory has the padding of buckets, as plans count it."""
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
    """Within the block parameters have the values of `offered`, rounded to their dtype; after it they are to the bit
    what they were. Elements that no rank offers keep their values.

    `offered` are pieces of the elements that this rank updates, wherever they lie. The block may run forward passes,
    and no updates. Collective over the data-parallel ranks; it takes the memory of a copy of `owned_weights`.
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
    """Copies the elements that both pieces have."""
    start, stop = max(source.start, target.start), min(source.stop, target.stop)
    if start < stop:
        values = source.data[start - source.start : stop - source.start]
        target.data[start - target.start : stop - target.start].copy_(values)


def _spread(ddp: DistributedDataParallel) -> None:
    """Gives all data-parallel ranks the weights that one of them has written."""
    ddp.start_param_sync()
    ddp.finish_param_sync()
