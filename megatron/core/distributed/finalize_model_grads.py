"""Final gradient of a step, after the last micro-batch: remaining reductions, and one division by the token count.

Losses are token sums, and so are gradients until the factor of `reduce_model_grads` divides them, once, by the number
of valid tokens in the global batch. So it cannot matter how the batch was split: micro-batches, data, context,
pipeline.

Sums over data-parallel ranks come first: they may have started during backward, and they leave each rank its shards.
The other sums commute with them and then run over the shards only: gradients that are partial over a model axis, and
those of parameters that two pipeline stages share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import all_reduce_
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.torch_private import foreach_copy_


def reduce_model_grads(
    ddp: DistributedDataParallel, total_tokens: Tensor, state: ParallelState, seed: float = 1.0
) -> Tensor:
    """Sums the owned part of every `main_grad`, and returns the factor that makes it the gradient of the mean loss per
    valid token: a float64 scalar on the device, for `DistributedOptimizer.step`, which needs no pass of its own for it,
    or `scale_grads_` of `ddp`.

    `total_tokens` is the `global_token_count`. Every loss sum was multiplied by `seed` before backward, which the
    factor divides out. A batch without valid tokens has gradient zero. Collective over the world.
    """
    ddp.finish_grad_sync()
    _sum_partial_grads(ddp, state)
    _sum_shared_grads(ddp, state)
    inverse = 1.0 / (total_tokens.clamp(min=1.0) * seed)
    return torch.where(total_tokens > 0, inverse, torch.zeros_like(inverse))


def global_token_count(num_tokens: Tensor, state: ParallelState, loss_rank: int | None = -1) -> Tensor:
    """Valid tokens of the global batch, on every rank: the count of pipeline rank `loss_rank`, summed over data- and
    context-parallel ranks. With None each pipeline rank counts for itself, and none waits for another. Scalar
    float64."""
    total = all_reduce_(num_tokens.detach().to(torch.float64, copy=True), state.dp_cp)
    if state.pp.size > 1 and loss_rank is not None:
        dist.broadcast(total, src=state.pp.ranks[loss_rank], group=state.pp.group)
    return total


def _sum_partial_grads(ddp: DistributedDataParallel, state: ParallelState) -> None:
    owned = [(bucket.owned_grad(piece), piece.meta) for bucket in ddp.buckets for piece in bucket.owned_pieces]
    for name in sorted({axis for _, meta in owned for axis in meta.partial_over}):
        all_reduce_flat_([grad for grad, meta in owned if name in meta.partial_over], state.axis(name), ddp.device)


def _sum_shared_grads(ddp: DistributedDataParallel, state: ParallelState) -> None:
    shared = {
        piece.meta.name: bucket.owned_grad(piece)
        for bucket in ddp.buckets
        for piece in bucket.owned_pieces
        if len(piece.meta.shared_stages) > 1
    }
    # Two stages build the same parameters beside others, and may have them in another order.
    all_reduce_flat_([shared[name] for name in sorted(shared)], state.embd, ddp.device)


def all_reduce_flat_(tensors: Sequence[Tensor], axis: Axis, device: torch.device) -> None:
    """Sums each tensor in place over the axis, in one collective for all on `device`. Tensors may be in host memory."""
    if axis.size == 1 or not tensors:
        return
    here = [tensor.to(device) for tensor in tensors]
    flat = here[0] if len(here) == 1 else torch.cat(here)
    dist.all_reduce(flat, group=axis.group)
    if flat is not tensors[0]:
        foreach_copy_(list(tensors), list(flat.split([tensor.numel() for tensor in tensors])))
