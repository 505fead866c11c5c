"""Functions that compute the final gradient of a step after the last micro-batch: they finish the reductions, and
return the factor that divides the gradients by the token count.

Losses are sums over tokens. The gradients of these sums are divided only once, by the number of valid tokens in the
global batch. `reduce_model_grads` returns the factor that performs this division. The result therefore does not depend
on how the batch is split over micro-batches and over data-, context- and pipeline-parallel ranks.

Gradients are first summed over data-parallel ranks, partly during the backward pass, so that each rank has the sums of
only its shards. Two other kinds of gradients must also be summed over ranks: gradients that are partial sums over a
model axis such as tensor parallelism, and gradients of parameters that two pipeline stages share. Gradients can be
summed over axes in any order, so each rank sums only its shards over the model axes and over the two stages.
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
    """Finish summing this rank's part of every `main_grad` over ranks, and return the factor that scales these sums to
    the gradient of the mean loss per token.

    The factor is a float64 scalar on the device. Pass the factor to `DistributedOptimizer.step`, which applies it
    without a separate pass over the gradients, or to `scale_grads_` of `ddp`. The gradient of a batch without valid
    tokens is zero. All ranks of the run must call this function.

    Args:
        ddp: Owner of this rank's gradient buffers.
        total_tokens: Result of `global_token_count`.
        state: Process groups.
        seed: Initial gradient of every loss sum, by which the returned factor also divides.
    """
    ddp.finish_grad_sync()
    _sum_partial_grads(ddp, state)
    _sum_shared_grads(ddp, state)
    inverse = 1.0 / (total_tokens.clamp(min=1.0) * seed)
    return torch.where(total_tokens > 0, inverse, torch.zeros_like(inverse))


def global_token_count(num_tokens: Tensor, state: ParallelState, loss_rank: int | None = -1) -> Tensor:
    """Compute the number of valid tokens in the global batch, and return it on every rank as a float64 scalar.

    The number is the token count of pipeline rank `loss_rank`, summed over data- and context-parallel ranks. If
    `loss_rank` is None, each pipeline rank uses the count that it computed, and no pipeline rank waits for another.
    """
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
    # The two stages that share parameters may list them in different orders, so sort them by name.
    all_reduce_flat_([shared[name] for name in sorted(shared)], state.embd, ddp.device)


def all_reduce_flat_(tensors: Sequence[Tensor], axis: Axis, device: torch.device) -> None:
    """Sum each tensor in place over the axis, in one collective on `device`. Tensors in host memory are copied to
    `device` and back."""
    if axis.size == 1 or not tensors:
        return
    here = [tensor.to(device) for tensor in tensors]
    flat = here[0] if len(here) == 1 else torch.cat(here)
    dist.all_reduce(flat, group=axis.group)
    if flat is not tensors[0]:
        foreach_copy_(list(tensors), list(flat.split([tensor.numel() for tensor in tensors])))
