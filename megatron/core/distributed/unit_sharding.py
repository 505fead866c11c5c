"""ZeRO-2 and ZeRO-3: unsharded gradients, and with ZeRO-3 unsharded parameters, exist only while a unit uses them.

A unit is a transformer layer, or a module outside of layers that owns parameters, such as the embedding and the output
layer. The ranks communicate before and after each forward and backward pass of a unit (Rajbhandari et al., arXiv
1910.02054, section 5, P_g and P_p):

- before the pass, the unit's parameters are gathered, and the gather for the next unit is started;
- after the pass, the parameters are freed, unless the next pass uses the same unit, as at the end of a forward pass;
- after a backward pass, the unit's gradients are reduced over the ranks, while the next unit computes.

The order of units is learned from the previous step, because a schedule uses the units in the same order in each step
with the same number of micro-batches. The order also includes recomputed forward passes. All ranks of a group therefore
gather and reduce in the same order. In the first step and during evaluation, no unit is gathered early.

With a split backward pass (I for inputs, W for weights), gradients are reduced after W. The W pass needs no parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron.core.collectives import Pending, start_all_gather, start_reduce_scatter
from megatron.core.config.parallel import UNIT_STORES, DDPConfig, ModelParallelConfig
from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.distributed.grad_readiness import units_of
from megatron.core.distributed.param_and_grad_buffer import Bucket, ParamAndGradBuffer, UnitStore, WholeUnits
from megatron.core.distributed.param_layout import BucketLayout, Piece
from megatron.core.init import alloc_storage, free_storage
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue, is_stale, mark_stale
from megatron.core.torch_private import call_after_backward, foreach_zero_, sequence_number, storage_id
from megatron.core.transformer.activation_store import tensors_in
from megatron.core.transformer.recompute import computing_again

WAIT_GATHERED, WAIT_REDUCED = "wait for parameters of a unit", "wait for reduced gradients of a unit"
"""Names of the profiler ranges in which a rank waits without computing. On GPUs, the ranges do not include the time for
which the host waits."""


class UnitBucket(Bucket):
    """Bucket that contains the parameters of one unit, such as a transformer layer. Between passes, this rank keeps
    only its shard of the gradients (ZeRO-2), and with ZeRO-3 only its shard of the parameters.

    Unsharded gradients exist from the first contribution of a micro-batch until they have been reduced and added to
    `grad_shard`. Unsharded parameters exist from the unit's first `acquire` to its last `release`. The memory of the
    unsharded parameters is repeatedly freed and reallocated, but the parameters remain the same views. Views that
    autograd saved are valid whenever the parameters are gathered."""

    def __init__(self, layout: BucketLayout, buffer: ParamAndGradBuffer) -> None:
        super().__init__(layout, buffer)
        self.shards_params = buffer.shard_params
        self.whole_params, self.whole_grads = True, False
        self.users = 0
        """Number of passes that currently compute with the parameters."""
        self.on_drop: list[Callable[[], None]] = []
        """Functions that are called when the unsharded parameters are freed."""
        self._reduced: Pending | None = None

    def memory(self, data: Tensor, sharded: bool) -> tuple[Tensor, Tensor]:
        if not sharded:
            return super().memory(data, sharded)
        first, stop = (end // self.layout.num_shards for end in (self.layout.start, self.layout.stop))
        return data.new_zeros(self.layout.stop - self.layout.start, device=self.device), data[first:stop]

    def adopt(self, owners: Sequence[nn.Parameter]) -> None:
        self.owners = list(owners)
        free_storage(self.grads)
        if self.shards_params:
            self.param_shard.copy_(self.params.chunk(self.axis.size)[self.axis.rank])
            self.drop_params()

    def start_gather(self) -> None:
        """Start gathering the parameters if they are not in memory. All ranks must call this method."""
        if not self.whole_params:
            alloc_storage(self.params)
            self._param_sync = start_all_gather(self.param_shard, self.axis, out=self.params)
            self.whole_params = True

    def acquire(self) -> None:
        """Begin a pass. If the parameters are not in memory, gather them; all ranks must then call this method."""
        self.users += 1
        self.start_gather()
        with record_function(WAIT_GATHERED):
            self.finish_param_sync()

    def release(self, keep: bool) -> None:
        """End a pass. Free the unsharded parameters, unless `keep` is True or another pass uses the unit."""
        self.users -= 1
        if not self.users and not keep:
            self.drop_params()

    def drop_params(self) -> None:
        """Free unsharded parameters between passes, for example because the values of their shards have changed."""
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
        """Allocate memory for unsharded gradients. The first contribution to each gradient overwrites this memory."""
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
        """Zero the unsharded gradients of all parameters that have received no gradient contribution in this step."""
        for owner in self.owners:
            if is_stale(owner):
                mark_stale(owner, False)
                owner.main_grad.zero_()  # type: ignore[attr-defined]

    def start_grad_sync(self) -> None:
        """Start reducing the unsharded gradients, if anything was added to them. All ranks must call this method."""
        self.finish_grad_sync()
        if self.whole_grads:
            self.zero_stale_grads()
            if self.before_sync is not None:
                self.before_sync(self)
            whole = self.grads if self.reduce_dtype == self.grads.dtype else self.grads.to(self.reduce_dtype)
            self._reduced = start_reduce_scatter(whole, self.axis)

    def finish_grad_sync(self) -> None:
        """Wait for the pending reduction, add the reduced sum to `grad_shard`, and free the unsharded gradients."""
        if self._reduced is not None:
            with record_function(WAIT_REDUCED):
                reduced = self._reduced.wait()
            self.grad_shard.add_(reduced)
            self._reduced = None
            self.drop_grads()

    def drop_grads(self) -> None:
        """Free the unsharded gradients."""
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


AHEAD = 3
"""Number of upcoming passes in which to search for the next unit to gather. Units in use are skipped."""

IN_FLIGHT = 1
"""Maximum number of gradient buckets whose reduction may overlap with the computation of other gradients."""


@dataclass(eq=False)
class Unit:
    """Module and the buckets of its parameters. Modules that share a tied parameter share a bucket."""

    module: nn.Module
    buckets: list[UnitBucket]
    number: int

    @property
    def used(self) -> bool:
        """True if a pass currently computes with the unit's parameters."""
        return all(bucket.users for bucket in self.buckets)


T = TypeVar("T")


@dataclass
class Order(Generic[T]):
    """Order in which the passes of a step use units or buckets. One step records the order for later steps."""

    known: dict[int, list[T]] = field(default_factory=dict)
    """Orders of units observed in earlier steps, keyed by number of micro-batches."""

    microbatches: int = 0
    """Number of micro-batches in the current step; 0 outside of steps."""

    asked: list[T] = field(default_factory=list)

    def begin(self, microbatches: int) -> None:
        self.microbatches, self.asked = microbatches, []

    def end(self) -> None:
        if self.microbatches:
            self.known[self.microbatches] = self.asked
        self.begin(0)

    def ask(self, unit: T) -> None:
        if self.microbatches:
            self.asked.append(unit)
            expected = self.known.get(self.microbatches, [])
            if expected[len(self.asked) - 1 : len(self.asked)] not in ([], [unit]):
                del self.known[self.microbatches]  # The order of the units has changed, so it must be recorded again.

    def following(self, count: int) -> list[T]:
        """Return the next `count` units in the learned order, or fewer at the end of the order."""
        if not self.microbatches:
            return []
        return self.known.get(self.microbatches, [])[len(self.asked) : len(self.asked) + count]


class UnitSharding(WholeUnits):
    """Hooks that shard gradients and, if `shards_params` is True, parameters of the units in one rank's modules. Copies
    of parameters in other dtypes are freed together with the parameters."""

    buckets: Sequence[UnitBucket]

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        shards_params: bool,
        queue: WeightGradQueue | None,
        casts: WeightCasts | None,
    ) -> None:
        """Install the hooks.

        `queue` holds back weight gradients of split backward passes. `casts` caches weights in another format."""
        self.buckets = of_units = [bucket for bucket in buckets if isinstance(bucket, UnitBucket)]
        assert len(of_units) == len(buckets), "buckets of units have a different class"
        self.shards_params = shards_params
        self.queue = queue
        self.order = Order[Unit]()
        self._reducing: deque[UnitBucket] = deque()
        bucket_of = {id(params[place.index]): bucket for bucket in of_units for place in bucket.layout.params}
        for bucket in of_units:
            for param in (params[place.index] for place in bucket.layout.params):
                param.before_main_grad = partial(self._open, bucket)  # type: ignore[attr-defined]
                if casts is not None:
                    bucket.on_drop.append(partial(casts.forget, param))
        self.units: list[Unit] = []
        seen = set[int]()
        for module, read in chain.from_iterable(map(units_of, modules)):
            needed = list(dict.fromkeys(bucket_of[id(param)] for param in read if id(param) in bucket_of))
            if needed and id(module) not in seen:
                seen.add(id(module))
                self.units.append(unit := Unit(module, needed, len(self.units)))
                module.register_forward_pre_hook(partial(self._before_forward, unit))
                after = partial(self._after_forward, unit)
                after.takes_pending = True  # type: ignore[attr-defined]
                module.register_forward_hook(after, always_call=True)
        self._last_users: dict[UnitBucket, int] = {}
        """For each bucket, the number of its first unit in forward order. A bucket's gradients are complete after the
        backward pass of its first unit."""

    def begin_step(self, microbatches: int) -> None:
        self.order.begin(microbatches)
        self.drop_grads()

    def wait_grad_sync(self) -> None:
        """Wait for all pending gradient reductions."""
        self._finish(0)

    def finish_grad_sync(self) -> None:
        for bucket in self.buckets:
            if bucket.whole_grads and bucket not in self._reducing:
                self._start(bucket)
        self._finish(0)
        self.order.end()
        self.drop_params()

    def zero_sums(self) -> None:
        if self.buckets:
            foreach_zero_([bucket.grad_shard for bucket in self.buckets])

    def drop_params(self) -> None:
        for bucket in self.buckets:
            bucket.drop_params()

    def drop_grads(self) -> None:
        self.wait_grad_sync()
        for bucket in self.buckets:
            bucket.drop_grads()

    def sharded_params(self) -> Iterator[OptimizerPiece]:
        for bucket in self.buckets if self.shards_params else ():
            owned = {piece.index: piece for piece in bucket.owned_pieces}
            for place in bucket.layout.params:
                piece = owned.get(place.index, Piece(place.index, place.meta, 0, 0, bucket.owned_range[0]))
                start = piece.offset - bucket.owned_range[0]
                data = bucket.param_shard[start : start + piece.stop - piece.start]
                yield OptimizerPiece("param", piece.meta, data, piece.start, piece.stop)

    def _acquire(self, unit: Unit) -> None:
        self.order.ask(unit)
        for bucket in unit.buckets:
            bucket.acquire()
        ahead = next((other for other in self.order.following(AHEAD) if not other.used), None)
        for bucket in ahead.buckets if ahead is not None else ():
            bucket.start_gather()

    def _release(self, unit: Unit) -> None:
        keep = self.order.following(1) == [unit]
        for bucket in unit.buckets:
            bucket.release(keep)

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple[object, ...]) -> None:
        if self.shards_params:
            self._acquire(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        """Hook that runs after a unit's forward pass. If a recomputed pass stops early, `output` is None."""
        if self.shards_params:
            output = _apart_from(unit, output)
            self._release(unit)
        if torch.is_grad_enabled() and not computing_again():
            self._watch_backward(unit, args, output)
        return output

    def _watch_backward(self, unit: Unit, args: tuple[object, ...], output: object) -> None:
        """Detect the start and the end of the unit's backward pass.

        The backward pass of a unit starts when the gradient of an output is available, and ends when the gradient of
        the input is available. Autograd first runs the operations that were recorded last, so no operation of the unit
        remains at that point. If no operation produced the input, the unit's backward pass counts as complete when the
        whole backward pass ends. A layer that returns a `Pending` stream has two outputs, one from the middle of the
        layer. The backward pass then lasts from the first output gradient to the last input gradient."""
        made_by = list(dict.fromkeys(result.grad_fn for result in _differentiable(output) if result.grad_fn))
        if not made_by:
            return
        for bucket in unit.buckets:
            self._last_users[bucket] = min(unit.number, self._last_users.get(bucket, unit.number))
        inputs = [(sequence_number(x.grad_fn), x) for x in _differentiable(args) if x.grad_fn is not None]
        at_end = not inputs
        if inputs:
            _, last = max(inputs, key=lambda made: made[0])
            last.register_hook(lambda grad: self._after_backward(unit))
        begun: list[bool] = []

        def begin(grads: object) -> None:  # keeps no tensor
            if not begun:
                begun.append(True)
                self._before_backward(unit, at_end)

        for node in made_by:
            node.register_prehook(begin)

    def _before_backward(self, unit: Unit, at_end: bool) -> None:
        if self.shards_params and getattr(unit.module, "backward_reads_parameters", True):
            self._acquire(unit)
        if at_end:
            call_after_backward(partial(self._after_backward, unit))

    def _after_backward(self, unit: Unit) -> None:
        if self.shards_params and getattr(unit.module, "backward_reads_parameters", True):
            self._release(unit)
        if self.queue is None:
            self._reduce(unit)
        else:
            self.queue.run_or_defer(partial(self._reduce, unit))

    def _reduce(self, unit: Unit) -> None:
        for bucket in unit.buckets if self.order.microbatches else ():
            if bucket.whole_grads and self._last_users[bucket] == unit.number:
                self._start(bucket)

    def _start(self, bucket: UnitBucket) -> None:
        if bucket in self._reducing:
            self._finish(0)
        self._finish(IN_FLIGHT - 1)
        bucket.start_grad_sync()
        self._reducing.append(bucket)

    def _finish(self, left: int) -> None:
        """Wait for pending reductions, oldest first, until at most `left` reductions are pending."""
        while len(self._reducing) > left:
            self._reducing.popleft().finish_grad_sync()

    def _open(self, bucket: UnitBucket) -> None:
        """Prepare a bucket so that a gradient can be added to it."""
        if bucket in self._reducing:
            self._finish(0)
        bucket.open_grads()


class ShardedUnits(UnitStore):
    """Unit store that keeps shards on the device. A unit store that keeps shards elsewhere derives from this class."""

    def bucket(self, layout: BucketLayout, buffer: ParamAndGradBuffer) -> Bucket:
        return UnitBucket(layout, buffer)

    def hooks(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        shards_params: bool,
        queue: WeightGradQueue | None,
        casts: WeightCasts | None,
    ) -> WholeUnits:
        return UnitSharding(modules, params, buckets, shards_params, queue, casts)


def unit_store(ddp: DDPConfig, parallel: ModelParallelConfig, device: torch.device) -> UnitStore:
    """Return the unit store that a configuration selects."""
    if (name := parallel.unit_store) is not None:
        store = UNIT_STORES[name](parallel, device)
        assert isinstance(store, UnitStore), f"{name} does not create a unit store"
        return store
    return ShardedUnits() if ddp.shards_gradients else UnitStore()


def _apart_from(unit: Unit, output: object) -> object:
    """Return the unit's output, but copy tensors that are views of the parameters, which are about to be freed."""
    if isinstance(output, Tensor):
        memory = storage_id(output)
        return output.clone() if any(memory == storage_id(b.params) for b in unit.buckets) else output
    if isinstance(output, tuple):
        parts = [_apart_from(unit, part) for part in output]
        return getattr(output, "_make", tuple)(parts)
    return output


def _differentiable(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a module's inputs or outputs that require gradients."""
    return (tensor for tensor in tensors_in(value) if tensor.requires_grad)
