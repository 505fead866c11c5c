"""Optimizer of the 2bw schedule, which keeps two versions of the weights. While the gradient norm of one step is still
being reduced, the passes of the next step already run.

In PipeDream-2BW (arXiv 2006.09503, section 3.1), the gradient of a step is computed with the weights before the last
update:

    W(t+1) = W(t) - lr g(W(t-1))

The passes of a step can therefore begin before the previous step ends, and the pipeline never empties. Unlike in the
paper, gradient clipping is exact: gradients are kept until the norm over all stages is known. Still, no rank waits for
the norm. Each rank performs the update of step t before its first pass of step t+2, in the action VALIDATE. While the
update of step t is pending, the passes of step t+1 continue.

Each parameter has two memory locations, one for each version. The parameter buffers contain the newest version, which
is all-gathered and saved in checkpoints. The other location contains the previous version. When all passes that use the
previous version have ended, an update overwrites it, and the two locations swap roles. No version is copied, so weights
that a forward pass saved for its backward pass remain valid."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import Pending
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, StepResult, Update
from megatron.core.optimizer.optimizer import OptimizerShard, ShardSpec
from megatron.core.parallel_state import ParallelState
from megatron.core.torch_private import foreach_copy_
from megatron.extensions.pipeline.pipedream_2bw.flags import PREVIOUS


class VersionedShard(OptimizerShard):
    """Optimizer shard with two versions of the parameters, which successive updates write alternately to two memory
    locations. An update reads a copy of the gradients, because the next step may already have overwritten the gradient
    buffers."""

    def __init__(self, spec: ShardSpec) -> None:
        super().__init__(spec)
        if self.aliased:
            self.aliased, self.main = False, self.params.clone()
        self.place, self.previous = spec.place, self.device_params
        """`previous` contains this shard's parameters before the last update. When the second memory location has been
        allocated, `previous` is a view of this location."""
        self.attach(torch.zeros_like(self.device_grads), self.device_params)

    def of_bucket(self, params: Tensor) -> Tensor:
        """Return the elements of `params` that belong to this shard. `params` contains the elements of the bucket that
        this rank owns."""
        return params[self.place.start : self.place.stop]

    def exported(self) -> dict[str, Tensor]:
        return super().exported() | {PREVIOUS: self.previous}


class _Waiting(NamedTuple):
    """Update that waits for the reduction of its gradient norm."""

    update: Update
    result: StepResult
    norm: Pending


class LateOptimizer(DistributedOptimizer):
    """Optimizer that delays each update as long as possible: the update of step t is performed just before the first
    pass of step t+2."""

    def __init__(
        self,
        config: OptimizerConfig,
        ddp: DistributedDataParallel,
        state: ParallelState,
        host_threads: int | None = None,
    ) -> None:
        super().__init__(config, ddp, state, host_threads)
        self.versioned = [shard for shard in self.shards if isinstance(shard, VersionedShard)]
        self.is_read = True
        """True if the result of the next call of `step` is read before the call after it, for example to log the
        loss."""
        self.other = [torch.full_like(buffer.param_data, torch.nan) for buffer in self.ddp.buffers]
        """Second memory location of each parameter buffer. Initially, this location is used for the parameters before
        the last update. It is filled with NaN until a checkpoint is loaded or `start` is called."""
        self._newest = _views(self.ddp)
        self._exchange()
        self._previous = _views(self.ddp)
        self._exchange()
        self._in_use = self._newest
        self._waiting: _Waiting | None = None

    @property
    def nbytes(self) -> tuple[int, int]:
        device, host = super().nbytes
        kept = sum(data.nbytes for data in self.other) + sum(shard.grads.nbytes for shard in self.versioned)
        return device + kept, host

    def begin_update(self, update: Update, own: Tensor, result: StepResult) -> None:
        assert self._waiting is None, "the update of the previous step has not been made"
        if self.versioned:
            kept, grads = [shard.grads for shard in self.versioned], [shard.device_grads for shard in self.versioned]
            foreach_copy_(kept, grads)
        self._waiting = _Waiting(update, result, self.grad_norm.start(own))
        if self.is_read:
            self.end_update()

    @torch.no_grad()
    def end_update(self) -> None:
        """Perform the pending update, if there is one. After this call, forward passes use the newest weights."""
        if self._waiting is not None:
            (update, result, norm), self._waiting = self._waiting, None
            verdict = self.verdict(update, norm.wait(), result)
            self.ddp.wait_param_sync()
            self._exchange()
            self._newest, self._previous = self._previous, self._newest
            self.apply(update, *verdict)
        self._use(self._newest)

    def use_for(self, of_next_step: bool) -> None:
        """Select the weight version for a forward or backward pass. Passes of the next step use the newest weights.
        Passes of the current step use the weights before the update of the previous step. While this update is pending,
        these are the newest weights. After the update, these are the previous version of the weights."""
        self._use(self._newest if of_next_step or self._waiting is not None else self._previous)

    def _use(self, version: list[Tensor]) -> None:
        if version is self._in_use:
            return
        for param, view in zip(self.ddp.params, version, strict=True):
            param.data = view
        self._in_use = version

    def _exchange(self) -> None:
        """Swap the roles of the two memory locations for all parameters."""
        for number, buffer in enumerate(self.ddp.buffers):
            buffer.param_data, self.other[number] = self.other[number], buffer.param_data
            for bucket in buffer.buckets:
                bucket.use_params_of(buffer)
        for shard in self.versioned:
            shard.previous = shard.device_params
            shard.device_params = shard.of_bucket(shard.bucket.owned_params)
            shard.attach(shard.grads, shard.device_params)

    @torch.no_grad()
    def start(self) -> bool:
        """All-gather the weights before the last update. Each rank has loaded its shard of these weights from the
        checkpoint. Weights that the checkpoint does not contain are replaced with the newest weights. Return True if
        the checkpoint contained all weights of this rank. All ranks must call this method."""
        complete = True
        for shard in self.versioned:
            pieces = shard.pieces({PREVIOUS: shard.previous})
            complete &= not any(piece.data.isnan().any().item() for piece in pieces)
            shard.previous.copy_(torch.where(shard.previous.isnan(), shard.device_params, shard.previous))
        self._exchange()
        self.ddp.start_param_sync()
        self.ddp.wait_param_sync()
        self._exchange()
        return complete


def _views(ddp: DistributedDataParallel) -> list[Tensor]:
    """Return views of all parameters in the memory location that the buffers currently use."""
    views: dict[int, Tensor] = {}
    for buffer in ddp.buffers:
        for bucket in buffer.buckets:
            for place in bucket.layout.params:
                span = slice(place.start - bucket.layout.start, place.stop - bucket.layout.start)
                views[place.index] = bucket.params[span].view(ddp.params[place.index].shape)
    return [views[index] for index in range(len(ddp.params))]
