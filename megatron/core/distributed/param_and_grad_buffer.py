"""ParamAndGradBuffer: contiguous memory of parameters and gradients, with reduce-scatters and all-gathers.

Each parameter becomes a view of one flat tensor. The `main_grad` of each parameter becomes a view of another flat
tensor, in the main dtype. One in-place collective on a slice of the gradient tensor reduces the gradients of a bucket,
and another collective on a slice of the parameter tensor gathers the parameters of the bucket. The bucket of a unit has
separate flat tensors, whose memory is repeatedly allocated and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.collectives import Pending, start_all_gather, start_all_reduce_, start_reduce_scatter
from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.distributed.param_layout import BucketLayout, BufferLayout, Piece
from megatron.core.init import has_storage
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue, is_stale, mark_stale
from megatron.core.torch_private import foreach_add_, foreach_copy_


class Bucket:
    """Part of a buffer that is reduced in one collective.

    `params` and `grads` cover the whole bucket. `param_shard` and `grad_shard` are the parts that belong to this
    data-parallel rank. With `shard_grads`, a reduction leaves the sum only in `grad_shard`; otherwise, it leaves the
    sum in `grads`. `owned_grads` is the part of `grads` that contains the sum, and `owned_params` is the corresponding
    part of `params`, which this rank updates.

    If `reduce_dtype` differs from the gradients' dtype, a reduction uses a copy of the gradients in `reduce_dtype`.
    The copy of the gradients is freed when the reduction ends. Gradients are summed over a rank's micro-batches in
    their own dtype. Only the sum over ranks is computed in `reduce_dtype`.
    """

    on_host = False
    """True if the rank keeps its part of the bucket in host memory, and copies this part to the device only while a
    pass uses it."""

    before_sync: Callable[[Bucket], None] | None = None
    """Diagnostic hook that is called before each reduction, while `grads` still contains the gradients of this rank
    alone."""

    def __init__(self, layout: BucketLayout, buffer: ParamAndGradBuffer) -> None:
        self.layout = layout
        self.axis = buffer.axis
        self.device = buffer.device
        self.reduce_dtype = buffer.reduce_dtype
        self.shard_grads, self.copies = buffer.shard_grads, buffer.copies
        shard_grads = self.shard_grads
        self.shard_range = layout.shard(self.axis.rank)
        self.grads, self.grad_shard = self.memory(buffer.grad_data, True)
        self.owned_range = self.shard_range if shard_grads else (layout.start, layout.stop)
        self.use_params_of(buffer)
        self.owned_grads = self.grad_shard if shard_grads else self.grads
        self.owned_pieces = layout.pieces(*self.owned_range)
        self._grad_sync: Pending | None = None
        self._rounded: Tensor | None = None
        self._param_sync: Pending | None = None
        self._bytes: Tensor | None = None
        self._behind = False

    def use_params_of(self, buffer: ParamAndGradBuffer) -> None:
        """Use a part of `buffer.param_data` as the memory of this bucket's parameters."""
        self.params, self.param_shard = self.memory(buffer.param_data, buffer.shard_params)
        self.owned_params = self.param_shard if self.shard_grads else self.params

    def memory(self, data: Tensor, sharded: bool) -> tuple[Tensor, Tensor]:
        """Return the whole bucket and this rank's shard as views of `data`, the memory of the buffer."""
        start = self.layout.start
        whole = data[start : self.layout.stop]
        return whole, whole[self.shard_range[0] - start : self.shard_range[1] - start]

    def gather_bytes(self) -> tuple[Tensor, Tensor]:
        """Switch the all-gathers of this bucket to parameters that have been cast to a one-byte format. Return uint8
        memory for the cast parameters of the whole bucket, and the part of this memory that belongs to the rank.
        """
        self._bytes = torch.zeros(self.params.shape, dtype=torch.uint8, device=self.params.device)
        return self._bytes, self._bytes.chunk(self.axis.size)[self.axis.rank]

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory for the states of those elements of the bucket that are updated on the host."""
        return torch.zeros(numel, dtype=dtype, device="cpu")

    def adopt(self, owners: Sequence[nn.Parameter]) -> None:
        """Hook that is called once with the parameters `owners` of the bucket, after their values have been moved into
        `params`. Subclasses can free or copy memory here; `Bucket.adopt` does nothing."""

    def owned_grad(self, piece: Piece) -> Tensor:
        """Return a 1-D view of the gradient of `piece`, which is one of `owned_pieces`."""
        start = piece.offset - self.owned_range[0]
        return self.owned_grads[start : start + piece.stop - piece.start]

    def start_grad_sync(self) -> None:
        """Start summing the gradients over the data-parallel ranks. All ranks of the axis must call this method."""
        assert self._grad_sync is None, "the last reduction of this bucket has not been waited for"
        if self.axis.size == 1:
            return
        if self.before_sync is not None:
            self.before_sync(self)
        whole, shard = self.grads, self.grad_shard
        if self.reduce_dtype != self.grads.dtype:
            whole = self.grads.to(self.reduce_dtype)
            shard = whole.chunk(self.axis.size)[self.axis.rank]
            self._rounded = shard if self.shard_grads else whole
        if self.shard_grads:
            self._grad_sync = start_reduce_scatter(whole, self.axis, out=shard)
        else:
            self._grad_sync = start_all_reduce_(whole, self.axis)

    def finish_grad_sync(self) -> None:
        """Wait for the reduction that `start_grad_sync` started. `owned_grads` then contains the sum."""
        if self._grad_sync is not None:
            self._grad_sync.wait()
            self._grad_sync = None
        if self._rounded is not None:
            self.owned_grads.copy_(self._rounded)
            self._rounded = None

    def start_param_sync(self) -> None:
        """Start the all-gather of `owned_params` into `params`. Do nothing if each rank owns the whole bucket."""
        assert self._param_sync is None, "the last gather of this bucket has not been waited for"
        if self._bytes is not None:
            shard = self._bytes.chunk(self.axis.size)[self.axis.rank]
            self._param_sync, self._behind = start_all_gather(shard, self.axis, out=self._bytes), True
        elif self.shard_grads and self.axis.size > 1:
            self._param_sync = start_all_gather(self.param_shard, self.axis, out=self.params)

    def finish_param_sync(self) -> None:
        """Wait for the all-gather that `start_param_sync` started."""
        if self._param_sync is not None:
            self._param_sync.wait()
            self._param_sync = None

    def gather_params_(self) -> None:
        """All-gather `owned_params` into `params` if the last all-gather sent only parameters cast to a one-byte
        format."""
        self.finish_param_sync()
        if self._behind:
            start_all_gather(self.param_shard, self.axis, out=self.params).wait()
            self._behind = False

    def gather_grads_(self) -> None:
        """All-gather the summed shards into `grads`. This method is for tests and diagnosis; training does not need
        it."""
        if self.shard_grads and self.axis.size > 1:
            start_all_gather(self.grad_shard, self.axis, out=self.grads).wait()


class WholeUnits:
    """Hooks that run before and after the passes of units (transformer layers, and modules outside of layers).
    In the class `WholeUnits`, the hooks do nothing, because gradients and parameters are not sharded. Classes that
    shard gradients or parameters derive from `WholeUnits`.
    """

    buckets: Sequence[Bucket] = ()
    """Buckets that contain units."""

    def begin_step(self, microbatches: int) -> None:
        """Start a step of `microbatches` micro-batches. If `microbatches` is 0, no gradient is reduced before the end
        of the step."""

    def finish_grad_sync(self) -> None:
        """Reduce the remaining gradients of a step. Free the unsharded parameters, because the optimizer is about to
        change their values."""

    def drop_params(self) -> None:
        """Free the unsharded parameters, for example because the values of their shards have changed."""

    def drop_grads(self) -> None:
        """Discard the unsharded gradients."""

    def zero_sums(self) -> None:
        """Set the gradient sums to zero, so that the next micro-batch starts new sums."""

    def sharded_params(self) -> Iterator[OptimizerPiece]:
        """Yield a live view of this rank's shard of each sharded parameter. A view is empty if the rank holds no
        element of the parameter."""
        return iter(())


class UnitStore:
    """Base class of stores, which decide where parameters and gradients of units are kept between passes.

    The base class keeps unsharded parameters and gradients on the device. The subclass `ShardedUnits` keeps only shards
    between passes.
    """

    def bucket(self, layout: BucketLayout, buffer: ParamAndGradBuffer) -> Bucket:
        """Create the bucket of one unit."""
        return Bucket(layout, buffer)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the persistent memory of a buffer that contains units. `device` is the device on which the units
        run."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def hooks(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        shards_params: bool,
        queue: WeightGradQueue | None,
        casts: WeightCasts | None,
    ) -> WholeUnits:
        """Return the hooks that run before and after the passes of `modules`.

        Args:
            modules: Modules of this rank.
            params: Parameters of these modules.
            buckets: Buckets that contain units.
            shards_params: True if parameters are sharded.
            queue: Queue that holds back the weight gradients of split backward passes.
            casts: Cache of weight copies in another number format.
        """
        return WholeUnits()


def have_values(params: Sequence[Tensor]) -> None:
    """Default of the argument `initialize`, for parameters that already have values. Assert that `params`, which lists
    parameters without values, is empty."""
    assert not params, f"{params[0].meta.name} has no values"  # type: ignore[attr-defined]


ALONE = Axis()


@dataclass(frozen=True)
class BufferKind:
    """Properties of a buffer: the dtypes of its gradients, and whether gradients and parameters are sharded over
    data-parallel ranks."""

    grad_dtype: torch.dtype
    reduce_dtype: torch.dtype
    """Dtype in which gradients are reduced over ranks."""

    shard_grads: bool
    shard_params: bool = False


class ParamAndGradBuffer:
    """Flat memory for one `BufferLayout`.

    The constructor moves the parameters `params` into this memory. `params` must have the same order as when the layout
    was planned. Values, shapes and the Parameter objects stay the same. For parameters that have no memory yet,
    `initialize` sets the values, one bucket at a time. `param.data` becomes a view of this memory, and
    `param.main_grad` becomes a view of zeroed gradients. Once per step, gradient shards are summed over `copies`, the
    axis of ranks that hold the same shards. The unit store `store` creates the buckets.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Sequence[nn.Parameter],
        axis: Axis,
        kind: BufferKind,
        initialize: Callable[[Sequence[Tensor]], None] = have_values,
        copies: Axis = ALONE,
        store: UnitStore | None = None,
    ) -> None:
        assert axis.size == layout.data_parallel_size, "the layout is planned for a different data-parallel size"
        self.layout = layout
        self.axis = axis
        self.shard_grads = kind.shard_grads
        self.reduce_dtype = kind.reduce_dtype
        self.shard_params, self.copies = kind.shard_params and layout.by_unit, copies
        sample, store = params[layout.params[0].index], (store if layout.by_unit and store is not None else UnitStore())
        self.device = sample.device
        self.param_data = store.zeros(layout.kept(kind.shard_params), sample.dtype, self.device)
        self.grad_data = store.zeros(layout.kept(True), kind.grad_dtype, self.device)
        self.buckets: list[Bucket] = []
        for bucket_layout in layout.buckets:
            bucket = store.bucket(bucket_layout, self)
            unset: list[nn.Parameter] = []
            for place in bucket_layout.params:
                param = params[place.index]
                assert param.dtype == sample.dtype, f"{place.meta.name} is {param.dtype}, others are {sample.dtype}"
                span = slice(place.start - bucket_layout.start, place.stop - bucket_layout.start)
                view = bucket.params[span].view(param.shape)
                if has_storage(param):
                    view.copy_(param.data)
                else:
                    unset.append(param)
                param.data = view
                param.main_grad = bucket.grads[span].view(param.shape)  # type: ignore[attr-defined]
            initialize(unset)
            bucket.adopt([params[place.index] for place in bucket_layout.params])
            self.buckets.append(bucket)
        ends = [0, *(place.stop for place in layout.params)]
        starts = [*(place.start for place in layout.params), layout.numel]
        gaps = [] if layout.by_unit else zip(ends, starts, strict=True)
        self.grad_gaps = [self.grad_data[stop:start] for stop, start in gaps if start > stop]
        """Views of the padding between parameters in the gradient buffer; empty for a buffer of units, whose unsharded
        gradients exist only during passes."""

    @property
    def on_host(self) -> bool:
        """True if the memory that the buffer keeps between passes is host memory."""
        return self.buckets[0].on_host

    def start_copies_sync(self) -> list[Pending]:
        """Start the all-reduce of this rank's gradient shards over the ranks that hold the same shards."""
        if self.copies.size == 1:
            return []
        shards = [self.grad_data] if self.layout.by_unit else [bucket.grad_shard for bucket in self.buckets]
        return [start_all_reduce_(shard, self.copies) for shard in shards]


LARGEST = 2**16
"""Maximum number of elements of a gradient that `SmallGrads` collects."""

AT_A_TIME = 256


class SmallGrads:
    """Collector of small gradients from autograd. A step must call `flush` before it reads any `main_grad`."""

    def __init__(self) -> None:
        self.enabled = False
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        """Pairs (parameter, gradient), keyed by the id of the parameter. Before a second gradient of a parameter is
        held back, all gradients in this mapping are added to their `main_grad`s."""

    def takes(self, param: Tensor, grad: Tensor) -> bool:
        """Return True if a gradient can be held back. The gradient must be small, `param` must have no gradient
        callbacks, and `param.main_grad` must always have memory."""
        waited = (getattr(param, name, None) for name in ("on_main_grad", "before_main_grad"))
        return self.enabled and grad.numel() <= LARGEST and not any(waited)

    def hold(self, param: Tensor, grad: Tensor) -> None:
        if id(param) in self._held or len(self._held) == AT_A_TIME:
            self.flush()
        self._held[id(param)] = param, grad

    def drop(self) -> None:
        """Discard all gradients that were held back."""
        self._held.clear()

    @torch.no_grad()
    def flush(self) -> None:
        """Add each gradient that was held back to the `main_grad` of its parameter. A stale `main_grad` is overwritten
        instead."""
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for param, grad in self._held.values():
            by_dtype.setdefault(grad.dtype, []).append((param, grad))
        self._held.clear()
        for held in by_dtype.values():
            _accumulate(held)


def _accumulate(held: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to the `main_grad`s of their parameters. All gradients must have the same dtype, and all
    `main_grad`s must have the same dtype."""
    main_dtype = held[0][0].main_grad.dtype  # type: ignore[attr-defined]
    joined = torch.cat([grad.reshape(-1) for _, grad in held]).to(main_dtype)
    parts = joined.split([grad.numel() for _, grad in held])
    stale = [is_stale(param) for param, _ in held]
    for writes, accumulate_ in ((True, foreach_copy_), (False, foreach_add_)):
        which = [number for number, old in enumerate(stale) if old is writes]
        if which:
            mains = [held[number][0].main_grad.view(-1) for number in which]  # type: ignore[attr-defined]
            accumulate_(mains, [parts[number] for number in which])
    for param, _ in held:
        mark_stale(param, False)
