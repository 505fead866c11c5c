"""Weights in host memory (--offload-weights). Weight matrices are on the device only while a forward or backward pass
needs them.

Weights are copied unit by unit. A unit is a transformer layer, the embedding or the output layer. Parameters and fp32
gradient sums are kept in host memory between passes, and the optimizer updates the parameters there. Vectors such as
norm weights and biases stay on the device. The design follows ZeRO-Infinity (Rajbhandari et al., arXiv 2104.07857,
section 5) and L2L (Pudipeddi et al., arXiv 2002.05645):

- the parameters of the next unit are copied to the device while a unit computes, in the forward and the backward pass;
- the gradients of a unit are copied directly into the sums on the host while the next unit computes;
- from the second micro-batch on, the gradient sum of a unit is copied back to the device before the unit's backward
pass adds to the sum. All additions are performed on the device, so every sum is bit-equal to the sum without
offloading.

`UnitSharding` determines when a unit is needed and which unit is next; this module performs the copies between host and
device. The device holds the parameters of at most two units, and the gradients of at most three units. While the
gradients of one unit are copied to the host, the gradients of another unit are accumulated, and the gradient sum of a
third unit may be copied to the device. With several data-parallel ranks (ZeRO-3), each rank keeps its shards in the
memory of its host. Parameter shards are copied to the device and then all-gathered. Gradients are reduce-scattered, and
the resulting shards are added to the gradient sums on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron.core.collectives import Pending, start_all_gather
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.distributed.param_and_grad_buffer import Bucket, ParamAndGradBuffer, WholeUnits
from megatron.core.distributed.param_layout import BucketLayout
from megatron.core.distributed.unit_sharding import (
    AHEAD,
    WAIT_REDUCED,
    Order,
    ShardedUnits,
    Unit,
    UnitBucket,
    UnitSharding,
)
from megatron.core.init import alloc_storage
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.core.transformer.recompute import computing_again
from megatron.extensions.memory.offload.flags import HostWeightFlags
from megatron.extensions.memory.offload.host_update import CopyQueue
from megatron.extensions.memory.offload.mapped_files import MappedFiles
from megatron.extensions.memory.offload.page_locked import host_zeros

ALONE = Axis()


@dataclass(eq=False)
class Arrival(Pending):
    """Asynchronous copy in progress from the host to the device or from the device to the host."""

    queue: CopyQueue | None = None
    event: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """Make kernels that are launched afterwards wait for the copy."""
        if self.queue is not None:
            self.queue.wait(self.event)
            self.queue = self.event = None
        return self.result


class HostUnitStore(ShardedUnits):
    """Store that keeps the units of one rank, such as layers, in host memory. Copies in the two directions use separate
    streams."""

    def __init__(self, config: ModelParallelConfig, device: torch.device) -> None:
        self.device = torch.device(device)
        self.to_host, self.to_device = CopyQueue(self.device), CopyQueue(self.device)
        folder = config.options(HostWeightFlags).offload_weights_folder
        self.files = None if folder is None else MappedFiles(folder)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.files is not None:
            return self.files.zeros(numel, dtype)
        return host_zeros(numel, dtype, pinned=device.type == "cuda")

    def bucket(self, layout: BucketLayout, buffer: ParamAndGradBuffer) -> Bucket:
        return StreamedBucket(layout, buffer, self)

    def hooks(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        shards_params: bool,
        queue: WeightGradQueue | None,
        casts: WeightCasts | None,
    ) -> WholeUnits:
        units = StreamedUnits(modules, params, buckets, shards_params, queue, casts)
        units.store = self
        return units

    def start_fetch(self, shard: Tensor, whole: Tensor, axis: Axis) -> Pending:
        """Start copying a shard from the host. Once the shard has been copied, `whole` is gathered from the shards of
        all ranks. Kernels launched so far may still use the memory of `whole` for another tensor, so the copy waits for
        these kernels."""
        part = whole.chunk(axis.size)[axis.rank]
        self.to_device.start_after()
        event = self.to_device.copy(shard, part)
        if axis.size == 1:
            return Arrival(whole, queue=self.to_device, event=event)
        with self.to_device.after_copies():
            return start_all_gather(part, axis, out=whole)

    def start_send(self, source: Tensor, target: Tensor) -> Arrival:
        """Start copying `source` on the device to `target` in host memory. The copy waits for all kernels launched so
        far."""
        self.to_host.start_after()
        return Arrival(target, queue=self.to_host, event=self.to_host.copy(source, target))


class StreamedBucket(UnitBucket):
    """Bucket of a unit whose weights are offloaded. The bucket's `param_shard` and `grad_shard` are in host memory."""

    on_host = True

    def __init__(self, layout: BucketLayout, buffer: ParamAndGradBuffer, store: HostUnitStore) -> None:
        self.store = store
        self.summed = False
        """True if a micro-batch of this step has written its gradients to `grad_shard`. False if `grad_shard` still
        contains the gradient sum of the previous step."""
        self.adding = False
        """True if the current micro-batch has already accumulated gradients into the unsharded gradient tensor."""
        self._coming: Pending | None = None
        self._leaving: Pending | None = None
        super().__init__(layout, buffer)

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        files = self.store.files
        return super().host_zeros(numel, dtype) if files is None else files.zeros(numel, dtype)

    def start_gather(self) -> None:
        if not self.whole_params:
            alloc_storage(self.params)
            self._param_sync = self.store.start_fetch(self.param_shard, self.params, self.axis)
            self.whole_params = True

    def open_grads(self) -> None:
        """Allocate device memory for gradients, and start fetching the gradient sum of earlier micro-batches from the
        host. Callers must call `await_sum` before they add to the gradient sum."""
        if self.whole_grads or not self.returns:
            super().open_grads()
            return
        self.finish_grad_sync()
        alloc_storage(self.grads)
        self._coming = self.store.start_fetch(self.grad_shard, self.grads, ALONE)
        self.whole_grads = True

    @property
    def returns(self) -> bool:
        """True if the gradient sum must be fetched to the device before the gradients of the next micro-batch are added
        to it. With a single data-parallel rank, the sum is fetched in advance from the second micro-batch on. With
        several data-parallel ranks, the sum is fetched only after gradients are reduced."""
        return self.summed and self.axis.size == 1

    def await_sum(self) -> None:
        """Wait until the gradient sum that `open_grads` is fetching has arrived on the device."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def start_grad_sync(self) -> None:
        self.adding = False
        if self.axis.size > 1:
            super().start_grad_sync()
            return
        self.finish_grad_sync()
        if self.whole_grads:
            self.await_sum()
            self.zero_stale_grads()
            self._leaving = self.store.start_send(self.grads, self.grad_shard)
            self.summed = True

    def finish_grad_sync(self) -> None:
        if self._leaving is not None:
            with record_function(WAIT_REDUCED):
                self._leaving.wait()
            self._leaving = None
            self.drop_grads()
        elif self._reduced is not None:
            with record_function(WAIT_REDUCED):
                self._add_to_sum(self._reduced.wait())
            self._reduced = None
            self.drop_grads()

    def _add_to_sum(self, reduced: Tensor) -> None:
        if self.summed:
            # The sum is fetched into this rank's slice of the gradient buffer. This slice is free after the reduction.
            total = self.grads.chunk(self.axis.size)[self.axis.rank]
            self.store.start_fetch(self.grad_shard, total, ALONE).wait()
            reduced = total.add_(reduced)
        self.store.start_send(reduced, self.grad_shard).wait()
        self.summed = True

    def drop_grads(self) -> None:
        assert self._leaving is None, "gradients in flight"
        self.await_sum()
        self.adding = False
        super().drop_grads()

    def gather_grads_(self) -> None:
        if self.axis.size > 1:
            super().gather_grads_()
        else:
            self.open_grads()
            self.await_sum()

    def settle_sum(self) -> None:
        """End a step. If no micro-batch has added to the gradient sum, set the sum to zero."""
        if not self.summed:
            self.grad_shard.zero_()
            self.summed = True


class StreamedUnits(UnitSharding):
    """Hooks that copy the weights and gradients of each unit between host and device, for a rank whose weights are in
    host memory."""

    buckets: Sequence[StreamedBucket]
    store: HostUnitStore

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        shards_params: bool,
        queue: WeightGradQueue | None,
        casts: WeightCasts | None,
    ) -> None:
        super().__init__(modules, params, buckets, shards_params, queue, casts)
        self.course = Order[Unit | StreamedBucket]()
        """Recorded order of two kinds of events: passes of units, and the first addition to each bucket's gradient sum.
        The order determines which gradient sum is fetched next."""
        self._forward_since = False
        """True if a forward pass has begun since the last copy of gradients to the host."""

    def begin_step(self, microbatches: int) -> None:
        super().begin_step(microbatches)
        self.course.begin(microbatches)

    def zero_sums(self) -> None:
        for bucket in self.buckets:
            bucket.summed = False

    def finish_grad_sync(self) -> None:
        super().finish_grad_sync()
        self.course.end()
        for bucket in self.buckets:
            bucket.settle_sum()
        # The host optimizer reads the gradient sums and overwrites the parameters, so all copies must be complete.
        self.store.to_host.synchronize()
        self.store.to_device.synchronize()

    def _acquire(self, unit: Unit) -> None:
        super()._acquire(unit)
        self.course.ask(unit)
        self._fetch_ahead()

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple[object, ...]) -> None:
        self._forward_since = self._forward_since or not computing_again()
        super()._before_forward(unit, module, args)

    def _open(self, bucket: UnitBucket) -> None:
        assert isinstance(bucket, StreamedBucket)
        if not bucket.adding:
            self._make_room()
            super()._open(bucket)
            bucket.adding = True
            self.course.ask(bucket)
            self._fetch_ahead()
        bucket.await_sum()

    def _fetch_ahead(self) -> None:
        """Start fetching the gradient sum of the next unit from the host, if one of the next backward passes will add
        gradients to this sum."""
        following = next((each for each in self.course.following(AHEAD) if isinstance(each, StreamedBucket)), None)
        if following is not None and following.returns and not following.whole_grads:
            self._make_room()
            following.open_grads()

    def _make_room(self) -> None:
        """Free the device memory of gradients that were sent to the host before the last forward pass. If this method
        were not called, the gradients of the last unit in a backward pass would stay on the device."""
        if self._forward_since:
            self._finish(0)
            self._forward_since = False
