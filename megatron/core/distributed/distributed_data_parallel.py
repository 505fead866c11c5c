"""Data parallelism: gradients add up in flat memory and are summed over the replicas bucket by bucket.

A gradient reaches `param.main_grad` by one of two ways. A linear layer's weight gradient is added there by whoever
computes it (at once, or later when the schedule has a slot); everything else comes through autograd, and a hook moves
it over as soon as it is complete. Both then report to `param.on_main_grad`, where that is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config import DDPConfig, ModelParallelConfig
from megatron.core.distributed.param_and_grad_buffer import Bucket, ParamAndGradBuffer
from megatron.core.distributed.param_layout import launch_order, plan_buffers
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.param_meta import ParamMeta


class DistributedDataParallel:
    """One rank's model stages (`modules`) with their gradients in buffers.

    Every parameter must carry its `meta`. Sharing one Parameter between modules is fine; it is kept once. With
    `use_distributed_optimizer` a rank ends up with the summed gradient of its own shards only.

    With `overlap_grad_reduce` a bucket's reduction starts as soon as its last gradient is complete: announce the last
    micro-batch of a stage with `last_microbatch`. In the first step the number of reports each parameter makes per
    micro-batch is learned and nothing starts early.
    """

    def __init__(
        self,
        ddp_config: DDPConfig,
        parallel_config: ModelParallelConfig,
        state: ParallelState,
        modules: Sequence[nn.Module],
        use_distributed_optimizer: bool = True,
        overlap_grad_reduce: bool = False,
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
            ParamAndGradBuffer(layout, self.params, axes[layout.expert], self.main_dtype, use_distributed_optimizer)
            for layout in self.layouts
        ]
        self.buckets: list[Bucket] = [self.buffers[b].buckets[k] for b, k in launch_order(self.layouts)]
        self._started = 0
        self._readiness = _Readiness(self) if overlap_grad_reduce else None
        self._hooks = [param.register_post_accumulate_grad_hook(_move_grad) for param in self.params]

    def zero_grad_buffer(self) -> None:
        """Forgets all gradients: call it before the first micro-batch of a step."""
        for buffer in self.buffers:
            buffer.grad_data.zero_()

    def last_microbatch(self, module: int) -> None:
        """From now on the gradients of modules[module] are complete once reported."""
        if self._readiness is not None:
            self._readiness.arm(module)

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


class _Readiness:
    """Counts the reports of parameters within a step and starts buckets that have all of theirs."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        index = {id(param): i for i, param in enumerate(ddp.params)}
        self.bucket_of = {p.index: k for k, bucket in enumerate(ddp.buckets) for p in bucket.layout.params}
        self.module_params = [[index[id(p)] for p in _trainable([module])] for module in ddp.modules]
        self.expected: list[int] | None = None
        self.armed: set[int] = set()
        self.reports = [0] * len(ddp.params)
        self.missing: list[int] = []
        for i, param in enumerate(ddp.params):
            param.on_main_grad = partial(self.report, i)  # type: ignore[attr-defined]
        self.end_step()

    def arm(self, module: int) -> None:
        self.armed.update(self.module_params[module])

    def report(self, param: int) -> None:
        bucket = self.bucket_of[param]
        assert bucket >= self.ddp._started, (
            f"{_meta(self.ddp.params[param]).name} got a gradient after its bucket was reduced"
        )
        if param not in self.armed:
            return
        self.reports[param] += 1
        if self.expected is not None and self.reports[param] == self.expected[param]:
            self.missing[bucket] -= 1
            while self.ddp._started < len(self.missing) and self.missing[self.ddp._started] == 0:
                self.ddp.start_grad_sync(self.ddp._started)

    def end_step(self) -> None:
        if self.expected is None and any(self.reports):
            self.expected = self.reports
        self.armed = set()
        self.reports = [0] * len(self.ddp.params)
        self.missing = [len(bucket.layout.params) for bucket in self.ddp.buckets]


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
    """Autograd hook: the gradient goes into `main_grad` and its own memory is freed.

    It runs without a gradient too, when whoever used the parameter has accounted for it already."""
    if param.grad is None:
        return
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
    report: Callable[[], None] | None = getattr(param, "on_main_grad", None)
    if report is not None:
        report()
