"""DistributedDataParallel: accumulates gradients in flat buffers and reduces them bucket by bucket.

A gradient reaches `param.main_grad` in one of two ways. For weights of linear layers and embeddings, the layer's own
autograd Function adds the gradient to `param.main_grad`, immediately or later from the weight-gradient queue. The
gradients of all other parameters are computed by autograd, and a hook adds each of these gradients to `param.main_grad`
once autograd has computed it. The function `param.on_main_grad`, if set, is called after each contribution to
`param.main_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.distributed.grad_readiness import GradReadiness, wait_before_forward
from megatron.core.distributed.param_and_grad_buffer import (
    Bucket,
    BufferKind,
    ParamAndGradBuffer,
    SmallGrads,
    UnitStore,
    have_values,
)
from megatron.core.distributed.param_layout import DEFAULT, launch_order, plan_buffers
from megatron.core.distributed.unit_sharding import unit_store
from megatron.core.init import alloc_storage, has_storage
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, ParamGather, gathered_format
from megatron.core.tensor_parallel.weight_grad import (
    accumulate_weight_grad,
    is_stale,
    mark_stale,
    rounding_sum,
)
from megatron.core.torch_private import foreach_mul_, foreach_zero_
from megatron.core.transformer.pass_context import PassContext


class DistributedDataParallel:
    """Gradient buffers and data-parallel communication of one rank's model chunks (`modules`).

    Every parameter needs a `meta` attribute with its `ParamMeta`. Modules may share a Parameter, which is then stored
    once. With `use_distributed_optimizer` (ZeRO-1), each rank receives only the summed gradient of its shards.

    With `overlap_grad_reduce`, a bucket's reduction starts during the backward pass, as soon as its last gradient is
    complete. With `overlap_param_gather`, the optimizer step leaves the all-gather of updated parameters in flight, and
    each module waits for its parameters before it runs. If GEMMs use a low-precision format, ranks may gather the
    weights in that format instead of the parameters. The parameters outside of this rank's shards are then outdated.
    Call `finish_param_sync` before you read parameters outside of a forward pass.

    If `data_parallel_sharding_strategy` shards gradients or parameters, unsharded matrices exist only during the
    forward and backward passes of the unit that contains them. A unit is a transformer layer, or a module outside of
    layers. `passes` holds two objects that all modules share: the queue of weight gradients that are computed later,
    and the cache of weights that have been cast to another dtype. `initialize` is a function that sets the values of
    parameters that have no memory yet (`WeightSetup.lazy`). Call `gather_params_` before you read sharded parameters.

    Gradients are in the main dtype, or in the `gradients_dtype` of `optimizer`. Sums over ranks are always in the main
    dtype, unless `grad_reduce_in_bf16` is set.
    """

    def __init__(
        self,
        ddp_config: DDPConfig,
        parallel_config: ModelParallelConfig,
        state: ParallelState,
        modules: Sequence[nn.Module],
        optimizer: OptimizerConfig = DEFAULT,
        passes: PassContext | None = None,
        initialize: Callable[[Sequence[Tensor]], None] = have_values,
    ) -> None:
        self.config = ddp_config
        self.parallel_config = parallel_config
        self.state = state
        self.modules = list(modules)
        self.use_distributed_optimizer, self.whole_roles = optimizer.use_distributed_optimizer, optimizer.whole_roles
        passes = passes or PassContext()
        gather = gathered_format(parallel_config)
        self._give_frozen_parameters_values(initialize)
        every = {id(p): p for module in self.modules for p in module.parameters() if p.requires_grad}
        self.params = list(every.values())
        """Trainable parameters in registration order. A shared parameter occurs only once."""
        self.layouts = plan_buffers(
            [(param.meta, tuple(param.shape)) for param in self.params],  # type: ignore[attr-defined]
            data_parallel_size=state.shard_axis("dp_cp").size,
            expert_data_parallel_size=state.shard_axis("expt_dp").size,
            bucket_size=ddp_config.ddp_bucket_size,
            group_of=optimizer.group_of,
            whole_roles=optimizer.whole_roles,
            linears_apart=gather is not None,
            unit_ranks=ddp_config.unit_ranks(parallel_config),
        )
        self.device = self.params[0].device if self.params else _communication_device(state.world)
        self.main_dtype: torch.dtype = getattr(torch, parallel_config.main_dtype)
        store = unit_store(ddp_config, parallel_config, self.device)
        drops = ddp_config.drops_parameters(parallel_config)
        self.buffers = self._build_buffers(optimizer, store, drops, initialize)
        self.buckets: list[Bucket] = [self.buffers[b].buckets[k] for b, k in launch_order(self.layouts)]
        by_unit = {bucket for buffer in self.buffers if buffer.layout.by_unit for bucket in buffer.buckets}
        self._reduced_whole = [bucket for bucket in self.buckets if bucket not in by_unit]
        """Buckets whose gradients are reduced once per step, in launch order."""
        of_units = [bucket for bucket in self.buckets if bucket in by_unit]
        self.units = store.hooks(self.modules, self.params, of_units, drops, passes.queue, passes.casts)
        self.param_gather: ParamGather | None = None if gather is None else LINEAR_FORMATS[gather].gather(self)
        """Object that casts weights before they are gathered; None if all weights are gathered in the parameters'
        dtype."""
        self._started = 0
        self._readiness = None
        if ddp_config.overlap_grad_reduce:
            self._readiness = GradReadiness(self.params, self._reduced_whole, self.start_grad_sync)
        if ddp_config.overlap_param_gather:
            wait_before_forward(self.modules, self.params, self.buckets)
        self._small_grads = SmallGrads()
        hook = partial(_move_grad, self._small_grads)
        self._hooks = [param.register_post_accumulate_grad_hook(hook) for param in self.params]

    def _give_frozen_parameters_values(self, initialize: Callable[[Sequence[Tensor]], None]) -> None:
        """Allocate and initialize frozen parameters. All other parameters are allocated in `ParamAndGradBuffer`."""
        for param in (param for module in self.modules for param in module.parameters()):
            if not (param.requires_grad or has_storage(param)):
                alloc_storage(param)
                initialize([param])

    def _build_buffers(
        self,
        optimizer: OptimizerConfig,
        store: UnitStore,
        drops_parameters: bool,
        initialize: Callable[[Sequence[Tensor]], None],
    ) -> list[ParamAndGradBuffer]:
        """Build a buffer for each layout in `self.layouts`, and set the method by which bf16 gradients are
        accumulated."""
        kind = BufferKind(
            getattr(torch, optimizer.gradients_dtype) if optimizer.gradients_dtype else self.main_dtype,
            torch.bfloat16 if self.config.grad_reduce_in_bf16 else self.main_dtype,
            optimizer.use_distributed_optimizer,
            drops_parameters,
        )
        buffers = []
        for layout in self.layouts:
            ranks = "expt_dp" if layout.expert else "dp_cp"
            axis, copies = self.state.shard_axis(ranks), self.state.copies_axis(ranks)
            buffers.append(ParamAndGradBuffer(layout, self.params, axis, kind, initialize, copies, store))
        if any(buffer.grad_data.dtype == torch.bfloat16 for buffer in buffers):
            round_into = rounding_sum(self.parallel_config.compiles(self.device.type))
            for param in self.params:
                param.main_grad_rounding = round_into  # type: ignore[attr-defined]
        return buffers

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """Return three sizes in bytes: of the parameters kept on the device, of the gradients kept on the device, and
        of all parameters and gradients kept in host memory."""
        found = [0, 0, 0]
        for buffer in self.buffers:
            for kind, kept in enumerate((buffer.param_data, buffer.grad_data)):
                found[2 if buffer.on_host else kind] += kept.nbytes
        return found[0], found[1], found[2]

    def begin_step(self, num_microbatches: int, overwrite: bool = False) -> None:
        """Start a step of `num_microbatches` micro-batches with zero gradients.

        If `overwrite` is True, gradients are not set to zero, but the first contribution to each `main_grad` overwrites
        it. Before the first contribution, or before a call of `zero_stale_grads`, `main_grad` contains the previous
        step's gradient. Use `accumulate_weight_grad` to add any gradient to a `main_grad`.
        """
        assert self._started == 0, "the previous step's reductions have not been waited for"
        self._small_grads.enabled = overwrite and self.device.type == "cuda"
        if overwrite:
            self._mark_all_stale()
        else:
            self.zero_grad_buffer()
        self.units.begin_step(num_microbatches)
        if self._readiness is not None:
            self._readiness.begin_step(num_microbatches)

    def zero_grad_buffer(self) -> None:
        """Zero the gradients."""
        self.units.drop_grads()
        self.units.zero_sums()
        self._small_grads.drop()
        for buffer in self.buffers:
            if not buffer.layout.by_unit:
                buffer.grad_data.zero_()
        for param in self.params:
            mark_stale(param, False)

    def _mark_all_stale(self) -> None:
        """Mark all gradients as stale, so that the first contributions in the next step overwrite the gradients.

        The padding between gradients is set to zero, because gradient norms include the padding. Gradient shards of
        units are set to zero, because the sum of each micro-batch is added to these shards.
        """
        self.units.zero_sums()
        if zeroed := [gap for buffer in self.buffers for gap in buffer.grad_gaps]:
            foreach_zero_(zeroed)
        for param in self._params_of(self._reduced_whole):
            mark_stale(param, True)

    def _params_of(self, buckets: Iterable[Bucket]) -> Iterator[nn.Parameter]:
        return (self.params[place.index] for bucket in buckets for place in bucket.layout.params)

    def zero_stale_grads(self, bucket: int | None = None) -> None:
        """Zero all gradients that have received no contribution in this step, in one bucket or in all buckets. Small
        gradients that were held back (`SmallGrads`) are added first.
        """
        self._small_grads.flush()
        buckets = self._reduced_whole if bucket is None else self._reduced_whole[bucket : bucket + 1]
        for param in self._params_of(buckets):
            if is_stale(param):
                mark_stale(param, False)
                param.main_grad.zero_()  # type: ignore[attr-defined]

    def start_grad_sync(self, bucket: int | None = None) -> None:
        """Start the reductions of all buckets up to and including `bucket` that have not started yet. By default, start
        the reductions of all buckets.

        All data-parallel ranks must call this method. No gradient may be added to a bucket whose reduction has started
        until the step ends.
        """
        end = len(self._reduced_whole) if bucket is None else bucket + 1
        while self._started < end:
            self.zero_stale_grads(self._started)
            self._reduced_whole[self._started].start_grad_sync()
            self._started += 1

    def finish_grad_sync(self) -> None:
        """Start the bucket reductions that have not started yet, and wait until all reductions end. After this call,
        the gradients that this rank owns are sums over data-parallel ranks."""
        self.start_grad_sync()
        self.units.finish_grad_sync()
        for bucket in self._reduced_whole:
            bucket.finish_grad_sync()
        for pending in [pending for buffer in self.buffers for pending in buffer.start_copies_sync()]:
            pending.wait()
        self._started = 0
        if self._readiness is not None:
            self._readiness.end_step()

    def scale_grads_(self, factor: Tensor) -> None:
        """Multiply the gradients that this rank owns by a scalar on the device."""
        for on_host in (False, True):
            if grads := [bucket.owned_grads for bucket in self.buckets if bucket.on_host is on_host]:
                foreach_mul_(grads, factor.to(grads[0].device, self.main_dtype))

    def start_param_sync(self, buckets: Collection[Bucket] | None = None) -> None:
        """Start the all-gathers of updated parameters, in the order in which the forward pass uses the parameters. By
        default, gather the parameters of all buckets."""
        if self.param_gather is not None:
            assert buckets is None, "Casts are computed from all parameters."
            self.param_gather.cast_()
        for bucket in reversed(self.buckets):
            if buckets is None or bucket in buckets:
                bucket.start_param_sync()

    def wait_param_sync(self) -> None:
        """Wait for the parameter all-gathers, so that a forward pass can run."""
        for bucket in reversed(self.buckets):
            bucket.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait for the all-gathers of parameters. If some weights have been gathered only in a low-precision format,
        also gather these weights in the parameters' dtype.

        After this call, each rank has the updated values of all parameters that are not sharded between passes. All
        data-parallel ranks must call this method.
        """
        self.wait_param_sync()
        for bucket in reversed(self._reduced_whole):
            bucket.gather_params_()

    def gather_params_(self) -> None:
        """Call `finish_param_sync`, and gather sharded parameters. The gathered parameters stay in memory until the
        next step. Only tests and diagnostic tools need this method."""
        self.finish_param_sync()
        for bucket in self.buckets:
            bucket.gather_params_()

    def drop_params(self) -> None:
        """Free the memory of gathered parameters, for example after their shards have been changed."""
        self.units.drop_params()

    def sharded_params(self) -> Iterator[OptimizerPiece]:
        """Yield a live view of this rank's shard of each sharded parameter. A view is empty if the rank holds no
        element of the parameter."""
        return self.units.sharded_params()

    def gather_grads_(self) -> None:
        """All-gather every `main_grad`. After a reduction, a rank may hold only the gradients of its shards. This
        method is for tests and diagnostic tools that need the gradients of all elements."""
        for bucket in self.buckets:
            bucket.gather_grads_()


def _communication_device(axis: Axis) -> torch.device:
    """Return the device on which a rank without parameters takes part in collectives over the axis."""
    if axis.size > 1 and "nccl" in dist.get_backend(axis.group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _move_grad(small_grads: SmallGrads, param: Tensor) -> None:
    """Autograd hook that adds `param.grad` to `param.main_grad`, immediately or together with other gradients, and then
    frees `param.grad`.

    Autograd also calls this hook if a layer's autograd Function has already added the gradient to `param.main_grad`;
    `param.grad` is then None.
    """
    grad, param.grad = param.grad, None
    if grad is None:
        return
    if small_grads.takes(param, grad):
        small_grads.hold(param, grad)
    else:
        accumulate_weight_grad(param, lambda out, overwrite: out.copy_(grad) if overwrite else out.add_(grad))
