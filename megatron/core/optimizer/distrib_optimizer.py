"""Distributed optimizer (ZeRO-1), which clips the gradients, updates this rank's shards, and gathers the updated
parameters.

Each data-parallel rank updates its shard of every bucket (Rajbhandari et al., arXiv 1910.02054, P_os). With
--no-use-distributed-optimizer, each rank's shard is the whole bucket.

The host waits for the device only if the loss scale is dynamic, or if the host updates optimizer states in host memory
and needs the gradients. If the loss or a gradient is not finite, the step changes neither parameters nor moments. The
update kernels read the overflow flag from device memory, so the host need not wait for this flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import STATE_STORES
from megatron.core.config.parallel import HOST_MEMORY
from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.distributed.param_layout import place_states
from megatron.core.host_to_device import HostCopy
from megatron.core.optimizer.chain import Chain
from megatron.core.optimizer.fused import states_of_shards
from megatron.core.optimizer.grad_norm import GradNorm
from megatron.core.optimizer.grad_scaler import build_loss_scaler
from megatron.core.optimizer.optimizer import HostUpdateRule, Rates, Shard, ShardSpec, StepValues
from megatron.core.optimizer.transforms import plan_of_chain
from megatron.core.parallel_state import ParallelState


class StepResult:
    """Result of one optimizer step, such as the gradient norm. When the host reads a value, it waits until the device
    has computed this result, but not for work that was launched later.

    The values can be read only after a call of `settle`.
    """

    def __init__(self, loss_scale: float, scale_can_fall: bool) -> None:
        self._values: HostCopy | None = None
        self.loss_scale = loss_scale
        """Loss scale that was used to compute the step's gradients."""
        self._scale_can_fall = scale_can_fall

    def settle(self, values: Tensor) -> None:
        """Store the values of the result. `values` is a float64 tensor [norm, overflow, skip, spike, *sums] on the
        device."""
        self.skip = values[2]
        """The value of `skipped` as a float64 scalar tensor on the device."""
        self._values = HostCopy[float](values)

    def _read(self) -> list[float]:
        assert self._values is not None, "the result can be read only after settle() was called"
        return self._values.read()

    @property
    def grad_norm(self) -> float:
        """Gradient norm of the whole model before clipping. If a gradient is not finite, the norm is not finite
        either."""
        return self._read()[0]

    @property
    def finite(self) -> bool:
        """True if all gradients, and all elements of `sums`, were finite."""
        return not self._read()[1]

    @property
    def skipped(self) -> bool:
        """True if the update was skipped, either because a value was not finite or because `Update.judge` decided to
        skip it."""
        return bool(self._read()[2])

    @property
    def spike(self) -> bool:
        """True if `Update.judge` classified the step as a spike. The update of such a step is not necessarily
        skipped."""
        return bool(self._read()[3])

    @property
    def sums(self) -> list[float]:
        """Values passed to the step as `Update.sums`, summed over all ranks."""
        return self._read()[4:]

    @property
    def scale_overflow(self) -> bool:
        """True if a gradient overflowed in fp16 and a lower loss scale can prevent the overflow.

        `scale_overflow` is False if the loss scale has reached its minimum. `scale_overflow` is also False if an
        element of `sums` is not finite, because the loss scale does not affect `sums`.
        """
        return not self.finite and self._scale_can_fall and all(map(math.isfinite, self.sums))


def _build_shards(config: OptimizerConfig, ddp: DistributedDataParallel) -> list[Shard]:
    """Return the shards of this rank, ordered by bucket and location."""
    build_shard, shards = STATE_STORES[config.state_store], []
    states = [states_of_shards(config, layout) for layout in ddp.layouts]
    for place in place_states(ddp.layouts, config):
        buffer = ddp.buffers[place.buffer]
        bucket = buffer.buckets[place.bucket]
        shard = build_shard(ShardSpec(bucket, buffer.layout, place, states[place.buffer], config, ddp.main_dtype))
        assert isinstance(shard, Shard), f"store of states {config.state_store} makes no shard"
        shards.append(shard)
    return shards


def _build_host_update(
    config: OptimizerConfig,
    shards: Sequence[Shard],
    chains: Sequence[Chain],
    threads: int | None,
) -> HostUpdateRule | None:
    """Return the object that updates the shards in host memory, or None if no shards are in host memory."""
    if not shards:
        return None
    assert config.host_store is not None
    update = HOST_MEMORY[config.host_store].update(config, shards, chains, threads)
    assert isinstance(update, HostUpdateRule), f"{config.host_store} makes no update"
    return update


Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function (gradient norm, overflow flag, sums of the step) -> (skip flag, spike flag) that decides whether to skip a
step's update. The skip flag is 1 to skip the update. The spike flag is 1 if the step is a spike, that is, if the loss
or the norm is unusually large. All arguments and results are float64 tensors on the device."""


@dataclass(frozen=True)
class Update:
    """Arguments of one step of `DistributedOptimizer`. To repeat a step, pass the same object again."""

    rates: Rates

    factor: Tensor | None = None
    """Factor by which the gradients must still be multiplied, as returned by `reduce_model_grads`."""

    sums: Tensor | None = None
    """Additional float64 values [n] of this rank, such as the loss. The all-reduce of the gradient norm also sums these
    values over all ranks. A sum that is not finite counts as an overflow."""

    judge: Judge | None = None
    """Function that decides whether to skip the update."""

    on_update: Callable[[Tensor], None] | None = None
    """Function that is called after the update and before the parameters are gathered. For example, the function can
    update the scales of FP8 weights. The argument of the function is a scalar tensor that is 1 if the update was
    skipped, else 0."""


class DistributedOptimizer:
    """Optimizer that updates this rank's shards of the main parameters with the chains of --optimizer. Each shard is on
    the device or on the host.

    All ranks of the world must make the same calls. The parameters must have their initial values before the optimizer
    is created. The constructor raises ValueError if `config` and `ddp` differ in `use_distributed_optimizer` or
    `whole_roles`.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        ddp: DistributedDataParallel,
        state: ParallelState,
        host_threads: int | None = None,
    ) -> None:
        """Create the optimizer. `host_threads` is the number of threads that update states in host memory. The default
        is `torch.get_num_threads()`."""
        if config.use_distributed_optimizer != ddp.use_distributed_optimizer:
            raise ValueError(
                f"use_distributed_optimizer is {config.use_distributed_optimizer} in OptimizerConfig and "
                f"{ddp.use_distributed_optimizer} in DistributedDataParallel; set both to the same value"
            )
        if config.whole_roles != ddp.whole_roles:
            raise ValueError(
                f"whole_roles is {sorted(config.whole_roles)} in OptimizerConfig and {sorted(ddp.whole_roles)} in "
                "DistributedDataParallel; set both to the same value"
            )
        self.config = config
        self.ddp = ddp
        self.scaler = build_loss_scaler(config, ddp.parallel_config.fp16)
        self.grad_norm = GradNorm(ddp.buckets, state, ddp.device, host_threads)
        self.shards = _build_shards(config, ddp)
        self._on_device = [shard for shard in self.shards if not shard.on_host]
        plan = plan_of_chain(config, ddp.layouts, state.dims, state.axis("stage").ranks)
        self._chain = Chain(config, self._on_device, plan, ddp, state)
        on_host = [shard for shard in self.shards if shard.on_host]
        chains_on_host = [Chain(config, [shard], plan, ddp, state) for shard in on_host]
        self.host_update = _build_host_update(config, on_host, chains_on_host, host_threads)
        self.chains = [self._chain, *chains_on_host]
        """Chains of all shards, on the device and on the host."""
        self.after_update: list[Callable[[Tensor], None]] = []
        """Hooks that are called after each update of the main parameters on the device, before the model parameters are
        written.

        The argument of a hook is a scalar tensor on the device that is 1 if the update was skipped, else 0. A training
        callback may append hooks in its `meters` method.
        """
        self.updates = torch.zeros((), dtype=torch.float64, device=ddp.device)
        """Number of updates so far, as a float64 scalar tensor on the device. Skipped steps do not count."""

    @torch.no_grad()
    def step(self, update: Update) -> StepResult:
        """Update the parameters once. The gradients must be reduced over all ranks, but need not be multiplied by the
        factor that `reduce_model_grads` returns. Most optimizers multiply the gradients in place by this factor and by
        the clipping factor. Fused optimizers instead apply both factors while they read the gradients.

        With `overlap_param_gather`, the all-gather of the updated parameters is still in flight when this method
        returns. Forward passes and `finish_param_sync` wait for the gathered parameters. If `ddp.param_gather` is not
        None, some parameters are gathered in another number format, such as FP8. In this case, only `finish_param_sync`
        gathers all parameters in their own dtype.
        """
        # Modules that have not run since the last step have not yet waited for the all-gather of their parameters.
        self.ddp.wait_param_sync()
        if self.host_update is not None:
            self.host_update.start()
        result = StepResult(self.scaler.scale, self.scaler.can_fall)
        self.begin_update(update, self.grad_norm.own(update.sums), result)
        return result

    def begin_update(self, update: Update, own: Tensor, result: StepResult) -> None:
        """Wait for the gradient norm, and then update the shards. `own` is this rank's contribution to the norm. A
        subclass may postpone a part of the update until `end_update`."""
        self.apply(update, *self.verdict(update, self.grad_norm.start(own).wait(), result))
        if self.scaler.dynamic:
            self.scaler.update(not result.finite)

    def end_update(self) -> None:
        """Complete the update that the last call of `step` started, so that the `StepResult` of this call can be read.
        All ranks must call this method."""

    def verdict(self, update: Update, summed: Tensor, result: StepResult) -> tuple[Tensor, Tensor | None]:
        """Return the skip flag (1 to skip the update, else 0) and the clipping factor. The clipping factor is at most 1
        and limits the gradient norm to --clip-grad. If gradients are not clipped, the clipping factor is None.

        The method also calls `result.settle`. `summed` is the result of the all-reduce that `GradNorm.start` launched.
        """
        norm, overflow, sums = self.grad_norm.finish(summed, update.factor)
        judge = update.judge
        refused, spike = (torch.zeros_like(overflow),) * 2 if judge is None else judge(norm, overflow, sums)
        skip = torch.maximum(overflow, refused)
        result.settle(torch.cat([torch.stack([norm, overflow, skip, spike]), sums]))
        limit = self.config.clip_grad
        return skip, (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else None

    def apply(self, update: Update, skip: Tensor, coefficient: Tensor | None) -> None:
        """Update the optimizer states and the parameters, unless `skip` is 1. Then start the all-gather of the
        parameters. `coefficient` is the clipping factor, or None."""
        factor, values = update.factor, StepValues(update.rates, skip, self.updates)
        if coefficient is not None and self.shards:
            factor = coefficient if factor is None else coefficient * factor
        scalars = None if self.host_update is None else self.host_update.scalars(skip, self.updates, factor)
        if factor is not None:
            self._chain.scale_gradients(factor)
        self._chain.step(values)
        for hook in self.after_update:
            hook(skip)
        for shard in self._on_device:
            shard.write_params()
        if update.on_update is not None:
            update.on_update(skip)
        if self.host_update is None or scalars is None:
            self.ddp.start_param_sync()
        else:
            early = self._updated_on_device()
            if early:
                self.ddp.start_param_sync(early)
            self.host_update.update(update.rates, scalars, factor is not None)
            self.ddp.start_param_sync(set(self.ddp.buckets) - early if early else None)
        self.updates += 1.0 - skip
        if not self.ddp.config.overlap_param_gather:
            self.ddp.wait_param_sync()

    def _updated_on_device(self) -> set[Bucket]:
        """Return the buckets whose shards are all updated on the device. The parameters of these buckets can be
        gathered before the host has updated the shards in host memory."""
        if self.ddp.param_gather is not None:
            return set()
        return set(self.ddp.buckets) - {shard.bucket for shard in self.shards if shard.on_host}

    @property
    def loss_scale(self) -> float:
        """Factor by which the losses of the next step are multiplied. The factor is 1 except in fp16 training."""
        return self.scaler.scale

    @property
    def step_count(self) -> int:
        """Number of updates so far, without skipped steps. Adam's bias correction uses the same number. Reading this
        property makes the host wait for the device."""
        return int(self.updates.item())

    @step_count.setter
    def step_count(self, value: int) -> None:
        self.updates.fill_(value)
        for chain in self.chains:
            chain.set_step_count(value)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Size in bytes of the main parameters and optimizer states on the device, and their size in host memory. The
        size in host memory includes transfer buffers."""
        device, host = (sum(sum(s.nbytes) for s in self.shards if s.on_host == place) for place in (False, True))
        device += sum(chain.nbytes for chain in self.chains if not chain.on_host)
        host += sum(chain.nbytes for chain in self.chains if chain.on_host)
        return device, host + (0 if self.host_update is None else self.host_update.nbytes)

    def sharded_state(self) -> list[OptimizerPiece]:
        """Return views of all main parameters and optimizer states that this rank updates. The views must only be read.
        States that are stored with scales cannot be viewed, so the result contains host copies of these states.

        If the model parameters themselves serve as main parameters, the result contains no main parameters.
        """
        self.finish_param_sync()
        return [*(piece for shard in self.shards for piece in shard.pieces(shard.exported())), *self._of_chain()]

    def _of_chain(self) -> Iterator[OptimizerPiece]:
        return (piece for chain in self.chains for piece in chain.pieces())

    @contextmanager
    def loading_state(self) -> Iterator[list[OptimizerPiece]]:
        """Context manager that yields the tensors of `sharded_state` so that the caller can overwrite them. The new
        values take effect at the end of the block. The caller must set `step_count` as well."""
        self.finish_param_sync()
        exported = [(shard, shard.exported()) for shard in self.shards]
        yield [*(piece for shard, tensors in exported for piece in shard.pieces(tensors)), *self._of_chain()]
        for shard, tensors in exported:
            shard.take_up(tensors)
        if any(shard.changes_params_when_loaded for shard in self.shards):
            self.ddp.start_param_sync()
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until the last update is complete and all parameters have been gathered. Call this method before you
        read parameters outside of a forward pass.
        """
        self.end_update()
        self.ddp.finish_param_sync()
