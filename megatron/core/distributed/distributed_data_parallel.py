"""Data parallelism: gradients add up in flat memory and are summed over the replicas bucket by bucket.

A gradient reaches `param.main_grad` by one of two ways. A linear layer's weight gradient is added there by whoever
computes it (at once, or later when the schedule has a slot); everything else comes through autograd, and a hook moves
it over as soon as it is complete. Both then report to `param.on_main_grad`, where that is set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.distributed.grad_readiness import GradReadiness, wait_before_forward
from megatron.core.distributed.param_and_grad_buffer import Bucket, ParamAndGradBuffer
from megatron.core.distributed.param_layout import launch_order, plan_buffers
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.weight_grad import accumulate_weight_grad


class DistributedDataParallel:
    """One rank's model stages (`modules`) with their gradients in buffers.

    Every parameter must carry its `meta`. Sharing one Parameter between modules is fine; it is kept once. With
    `use_distributed_optimizer` a rank ends up with the summed gradient of its own shards only.

    With `overlap_grad_reduce` a bucket's reduction starts during backward, as soon as its last gradient is complete.
    With `overlap_param_gather` the optimizer's step leaves the gather of the updated parameters under way, and each
    module waits for its own before it runs: whoever reads parameters outside of a forward pass calls
    `finish_param_sync` first.
    """

    def __init__(
        self,
        ddp_config: DDPConfig,
        parallel_config: ModelParallelConfig,
        state: ParallelState,
        modules: Sequence[nn.Module],
        use_distributed_optimizer: bool = True,
    ) -> None:
        self.config, self.parallel_config, self.state, self.modules = ddp_config, parallel_config, state, list(modules)
        self.use_distributed_optimizer = use_distributed_optimizer
        self.params = _trainable(self.modules)
        axes = {False: state.dp_cp, True: state.axis("expt_dp")}
        self.layouts = plan_buffers(
            [(_meta(param), tuple(param.shape)) for param in self.params],
            data_parallel_size=axes[False].size,
            expert_data_parallel_size=axes[True].size,
            bucket_size=ddp_config.ddp_bucket_size,
        )
        self.device = self.params[0].device if self.params else _communication_device(state.world)
        self.main_dtype: torch.dtype = getattr(torch, parallel_config.main_dtype)
        self.buffers = [
            ParamAndGradBuffer(
                layout,
                self.params,
                axes[layout.expert],
                self.main_dtype,
                use_distributed_optimizer,
                torch.bfloat16 if ddp_config.grad_reduce_in_bf16 else self.main_dtype,
            )
            for layout in self.layouts
        ]
        self.buckets: list[Bucket] = [self.buffers[b].buckets[k] for b, k in launch_order(self.layouts)]
        self._started = 0
        self._readiness = None
        if ddp_config.overlap_grad_reduce:
            self._readiness = GradReadiness(self.params, self.buckets, self.start_grad_sync)
        if ddp_config.overlap_param_gather:
            wait_before_forward(self.modules, self.params, self.buckets)
        self._hooks = [param.register_post_accumulate_grad_hook(_move_grad) for param in self.params]

    def begin_step(self, num_microbatches: int) -> None:
        """Forgets all gradients and expects those of so many micro-batches, after which they are complete."""
        assert self._started == 0, "reductions of the step before have not been waited for"
        self.zero_grad_buffer()
        if self._readiness is not None:
            self._readiness.begin_step(num_microbatches)

    def zero_grad_buffer(self) -> None:
        """Forgets all gradients."""
        for buffer in self.buffers:
            buffer.grad_data.zero_()

    def start_grad_sync(self, bucket: int | None = None) -> None:
        """Starts the reductions that have not started, in launch order, up to and with `bucket` or all of them.

        Collective over the data-parallel ranks; no gradient may be added to these buckets until the step ends.
        """
        end = len(self.buckets) if bucket is None else bucket + 1
        while self._started < end:
            self.buckets[self._started].start_grad_sync()
            self._started += 1

    def finish_grad_sync(self) -> None:
        """Starts what has not started and waits for all: the owned gradients are sums over data parallel after it."""
        self.start_grad_sync()
        for bucket in self.buckets:
            bucket.finish_grad_sync()
        self._started = 0
        if self._readiness is not None:
            self._readiness.end_step()

    def start_param_sync(self) -> None:
        """Starts gathering the updated parameters, those that the forward pass needs first at the front."""
        for bucket in reversed(self.buckets):
            bucket.start_param_sync()

    def finish_param_sync(self) -> None:
        """Waits until every parameter is whole again."""
        for bucket in reversed(self.buckets):
            bucket.finish_param_sync()

    def gather_grads_(self) -> None:
        """Makes every `main_grad` whole on every rank, after a sync that left shards. For tests and diagnosis."""
        for bucket in self.buckets:
            bucket.gather_grads_()


def _trainable(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Parameters that want a gradient, each once, in order of registration."""
    return list({id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values())


def _meta(param: nn.Parameter) -> ParamMeta:
    return param.meta  # type: ignore[attr-defined]


def _communication_device(axis: Axis) -> torch.device:
    """Where tensors for collectives over the axis live, if no parameter tells."""
    if axis.size > 1 and "nccl" in dist.get_backend(axis.group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _move_grad(param: Tensor) -> None:
    """Autograd hook: adds the gradient to `main_grad` and frees it.

    It also runs without a gradient, for a parameter whose Functions have added theirs to `main_grad` already.
    """
    grad, param.grad = param.grad, None
    if grad is not None:
        accumulate_weight_grad(param, lambda main_grad: main_grad.add_(grad))
