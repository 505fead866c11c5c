"""Bucket of one unit, whose whole gradients and whole parameters come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.profiler import record_function

from megatron.core.collectives import Pending, start_all_gather, start_reduce_scatter
from megatron.core.distributed.param_and_grad_buffer import Bucket, ParamAndGradBuffer
from megatron.core.distributed.param_layout import BucketLayout
from megatron.core.init import alloc_storage, free_storage
from megatron.core.tensor_parallel.weight_grad import is_stale, mark_stale

WAIT_GATHERED, WAIT_REDUCED = "wait for parameters of a unit", "wait for reduced gradients of a unit"
"""Ranges of profiles: the time in which a rank waits and does not compute. On GPUs that of the host, which is none."""


class UnitBucket(Bucket):
    """Bucket of one unit, of which this rank keeps the shard of the gradients (ZeRO-2), and of the parameters (ZeRO-3).

    Whole gradients exist from the first contribution of a micro-batch until they have been reduced and added to
    `grad_shard`, whole parameters between a first `acquire` and the last `release`. Their memory is taken and given
    back under the same views, so that what autograd has saved of a parameter is valid whenever it is whole.
    """

    def __init__(self, layout: BucketLayout, buffer: ParamAndGradBuffer) -> None:
        super().__init__(layout, buffer)
        self.shards_params = buffer.shard_params
        self.whole_params, self.whole_grads = True, False
        self.users = 0
        """Passes that compute with the parameters now."""
        self.on_drop: list[Callable[[], None]] = []
        """Called when whole parameters are dropped."""
        self._reduced: Pending | None = None

    def memory(self, data: Tensor, sharded: bool) -> tuple[Tensor, Tensor]:
        if not sharded:
            return super().memory(data, sharded)
        first, stop = (end // self.layout.num_shards for end in (self.layout.start, self.layout.stop))
        return data.new_zeros(self.layout.stop - self.layout.start), data[first:stop]

    def adopt(self, owners: Sequence[nn.Parameter]) -> None:
        self.owners = list(owners)
        free_storage(self.grads)
        if self.shards_params:
            self.param_shard.copy_(self.params.chunk(self.axis.size)[self.axis.rank])
            self.drop_params()

    def start_gather(self) -> None:
        """Starts to make the parameters whole, where they are not and no gather is under way. Collective."""
        if not self.whole_params:
            alloc_storage(self.params)
            self._param_sync = start_all_gather(self.param_shard, self.axis, out=self.params)
            self.whole_params = True

    def acquire(self) -> None:
        """Makes the parameters whole for one more pass. Collective where they are not whole."""
        self.users += 1
        self.start_gather()
        with record_function(WAIT_GATHERED):
            self.finish_param_sync()

    def release(self, keep: bool) -> None:
        """Ends the use of one pass: after the last one the memory is given back, unless the next pass is to `keep`
        it."""
        self.users -= 1
        if not self.users and not keep:
            self.drop_params()

    def drop_params(self) -> None:
        """Gives back the memory of whole parameters, as when they have changed. None may be in use."""
        assert self.users == 0, "parameters in use"
        if self.shards_params and self.whole_params:
            self.finish_param_sync()
            free_storage(self.params)
            self.whole_params = False
            for drop in self.on_drop:
                drop()

    def start_param_sync(self) -> None:
        if self.shards_params:
            self.drop_params()
        else:
            super().start_param_sync()

    def open_grads(self) -> None:
        """Makes room for contributions to whole gradients: the first one of each parameter writes over it."""
        self.finish_grad_sync()
        if not self.whole_grads:
            alloc_storage(self.grads)
            start = self.layout.start
            ends = [start, *(place.stop for place in self.layout.params)]
            starts = [*(place.start for place in self.layout.params), self.layout.stop]
            for stop, following in zip(ends, starts, strict=True):
                self.grads[stop - start : following - start].zero_()
            for owner in self.owners:
                mark_stale(owner, True)
            self.whole_grads = True

    def zero_stale_grads(self) -> None:
        """Zeroes whole gradients to which nothing has been added."""
        for owner in self.owners:
            if is_stale(owner):
                mark_stale(owner, False)
                owner.main_grad.zero_()  # type: ignore[attr-defined]

    def start_grad_sync(self) -> None:
        """Starts to reduce what has been added to whole gradients, if anything has. Collective over the axis."""
        self.finish_grad_sync()
        if self.whole_grads:
            self.zero_stale_grads()
            whole = self.grads if self.reduce_dtype == self.grads.dtype else self.grads.to(self.reduce_dtype)
            self._reduced = start_reduce_scatter(whole, self.axis)

    def finish_grad_sync(self) -> None:
        """Waits for `start_grad_sync`, adds its sum to `grad_shard` and gives back the memory of whole gradients."""
        if self._reduced is not None:
            with record_function(WAIT_REDUCED):
                reduced = self._reduced.wait()
            self.grad_shard.add_(reduced)
            self._reduced = None
            self.drop_grads()

    def drop_grads(self) -> None:
        """Gives back the memory of whole gradients."""
        assert self._reduced is None, "gradients on their way"
        if self.whole_grads:
            for owner in self.owners:
                mark_stale(owner, False)
            free_storage(self.grads)
            self.whole_grads = False

    def gather_params_(self) -> None:
        self.start_gather()
        super().gather_params_()

    def gather_grads_(self) -> None:
        self.open_grads()
        super().gather_grads_()
        for owner in self.owners:
            mark_stale(owner, False)
