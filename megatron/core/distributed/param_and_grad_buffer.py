"""ParamAndGradBuffer: contiguous memory of parameters and gradients, and its reduce-scatters and all-gathers.

Each parameter becomes a view of one flat tensor, and its `main_grad` a view of another, in the main dtype. One in-place
collective on a slice of that memory reduces the gradients of a bucket, and another gathers its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.collectives import Pending, start_all_gather, start_all_reduce_, start_reduce_scatter
from megatron.core.distributed.param_layout import BucketLayout, BufferLayout, Piece
from megatron.core.parallel_state import Axis


class Bucket:
    """Part of a buffer that is reduced in one collective.

    `params` and `grads` are the whole bucket, `param_shard` and `grad_shard` this data-parallel rank's part. With
    `shard_grads`, a reduction leaves its sum in `grad_shard` alone, else in `grads`; `owned_*` is that part, which this
    rank updates.

    If `reduce_dtype` differs from the gradients' dtype, a reduction uses a rounded copy, freed at its end. So the sum
    over a rank's micro-batches keeps the gradients' precision; only the sum over ranks has that of `reduce_dtype`.
    """

    def __init__(self, layout: BucketLayout, buffer: ParamAndGradBuffer) -> None:
        self.layout, self.axis, self.reduce_dtype = layout, buffer.axis, buffer.reduce_dtype
        self.shard_grads = shard_grads = buffer.shard_grads
        self.params = buffer.param_data[layout.start : layout.stop]
        self.grads = buffer.grad_data[layout.start : layout.stop]
        self.shard_range = layout.shard(self.axis.rank)
        first, last = self.shard_range[0] - layout.start, self.shard_range[1] - layout.start
        self.param_shard, self.grad_shard = self.params[first:last], self.grads[first:last]
        self.owned_range = self.shard_range if shard_grads else (layout.start, layout.stop)
        self.owned_params = self.param_shard if shard_grads else self.params
        self.owned_grads = self.grad_shard if shard_grads else self.grads
        self.owned_pieces = layout.pieces(*self.owned_range)
        self._grad_sync: Pending | None = None
        self._rounded: Tensor | None = None
        self._param_sync: Pending | None = None
        self._fp8: Tensor | None = None
        self._behind = False

    def gather_in_fp8(self) -> tuple[Tensor, Tensor]:
        """Makes gathers of parameters send bytes, which `fp8_param_gather` casts, in place of parameters. Returns the
        memory of the whole bucket in uint8, and this rank's part of it."""
        self._fp8 = torch.zeros(self.params.shape, dtype=torch.uint8, device=self.params.device)
        return self._fp8, self._fp8.chunk(self.axis.size)[self.axis.rank]

    def owned_grad(self, piece: Piece) -> Tensor:
        """Gradient of one of `owned_pieces`, a 1-D view."""
        start = piece.offset - self.owned_range[0]
        return self.owned_grads[start : start + piece.stop - piece.start]

    def start_grad_sync(self) -> None:
        """Starts to sum the gradients over the data-parallel ranks. Collective over the axis."""
        assert self._grad_sync is None, "the last reduction of this bucket has not been waited for"
        if self.axis.size == 1:
            return
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
        """Waits for `start_grad_sync`: `owned_grads` then holds the sum."""
        if self._grad_sync is not None:
            self._grad_sync.wait()
            self._grad_sync = None
        if self._rounded is not None:
            self.owned_grads.copy_(self._rounded)
            self._rounded = None

    def start_param_sync(self) -> None:
        """Starts to all-gather `owned_params` into `params`; does nothing where each rank owns the whole."""
        assert self._param_sync is None, "the last gather of this bucket has not been waited for"
        if self._fp8 is not None:
            shard = self._fp8.chunk(self.axis.size)[self.axis.rank]
            self._param_sync, self._behind = start_all_gather(shard, self.axis, out=self._fp8), True
        elif self.shard_grads and self.axis.size > 1:
            self._param_sync = start_all_gather(self.param_shard, self.axis, out=self.params)

    def finish_param_sync(self) -> None:
        """Waits for `start_param_sync`."""
        if self._param_sync is not None:
            self._param_sync.wait()
            self._param_sync = None

    def gather_params_(self) -> None:
        """All-gathers `owned_params` into `params` where the last gather was in fp8."""
        self.finish_param_sync()
        if self._behind:
            start_all_gather(self.param_shard, self.axis, out=self.params).wait()
            self._behind = False

    def gather_grads_(self) -> None:
        """All-gathers the summed shards into `grads`. For tests and diagnosis; training does not need it."""
        if self.shard_grads and self.axis.size > 1:
            start_all_gather(self.grad_shard, self.axis, out=self.grads).wait()


class ParamAndGradBuffer:
    """Memory of one `BufferLayout`.

    Moves `params`, the list that the layout was planned from, into it. Values, shapes and the Parameter objects stay
    the same; `param.data` becomes a view, and `param.main_grad` a view of zeroed gradients in `grad_dtype`. Reductions
    over ranks use `reduce_dtype`.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Sequence[nn.Parameter],
        axis: Axis,
        grad_dtype: torch.dtype,
        shard_grads: bool,
        reduce_dtype: torch.dtype,
    ) -> None:
        assert axis.size == layout.data_parallel_size, "the layout is planned for another data-parallel size"
        self.layout, self.axis, self.shard_grads, self.reduce_dtype = layout, axis, shard_grads, reduce_dtype
        sample = params[layout.params[0].index]
        self.param_data = torch.zeros(layout.numel, dtype=sample.dtype, device=sample.device)
        self.grad_data = torch.zeros(layout.numel, dtype=grad_dtype, device=sample.device)
        ends = [0, *(place.stop for place in layout.params)]
        starts = [*(place.start for place in layout.params), layout.numel]
        self.grad_gaps = [self.grad_data[stop:start] for stop, start in zip(ends, starts, strict=True) if start > stop]
        """The gradients' memory between parameters."""
        for place in layout.params:
            param = params[place.index]
            assert param.dtype == sample.dtype, f"{place.meta.name} is {param.dtype}, others are {sample.dtype}"
            view = self.param_data[place.start : place.stop].view(param.shape)
            view.copy_(param.data)
            param.data = view
            param.main_grad = self.grad_data[place.start : place.stop].view(param.shape)  # type: ignore[attr-defined]
        self.buckets = [Bucket(bucket, self) for bucket in layout.buckets]
