"""Distributed optimizer (ZeRO-1), which clips gradients, updates this rank's shards, and gathers the updated
parameters.

Each data-parallel rank updates its shard of every bucket (Rajbhandari et al., arXiv 1910.02054, P_os). Under
--no-use-distributed-optimizer, the optimizer works in the same way, but the shard of every rank is the whole bucket.

The host waits for the device in two cases only: to change a dynamic loss scale, or to read gradients for states that it
updates in host memory. A non-finite loss or gradient leaves parameters and moments unchanged in every precision,
because the update kernels read the overflow flag on the device.
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
    """Result of one optimizer step, such as the gradient norm. Reading a value waits until the device has finished this
    step, but not for later work.

    The values can be read only after `settle` was called.
    """

    def __init__(self, loss_scale: float, scale_can_fall: bool) -> None:
        self._values: HostCopy | None = None
        self.loss_scale = loss_scale
        """Loss scale that was used to compute the step's gradients."""
        self._scale_can_fall = scale_can_fall

    def settle(self, values: Tensor) -> None:
        """Store the values of the result, [norm, overflow, skip, spike, *sums] in float64 on the device."""
        self.skip = values[2]
        """The value of `skipped` as a float64 scalar on the device."""
        self._values = HostCopy[float](values)

    def _read(self) -> list[float]:
        assert self._values is not None, "the result can be read only after settle() was called"
        return self._values.read()

    @property
    def grad_norm(self) -> float:
        """Return the gradient norm of the whole model before clipping. If a gradient is not finite, the norm is not
        finite either."""
        return self._read()[0]

    @property
    def finite(self) -> bool:
        """True if all gradients, and all elements of `sums`, were finite."""
        return not self._read()[1]

    @property
    def skipped(self) -> bool:
        """True if the update was skipped, because of non-finite values or because `Update.judge` decided so."""
        return bool(self._read()[2])

    @property
    def spike(self) -> bool:
        """True if `Update.judge` classified the step as a spike. Even if a step is a spike, its update may have been
        applied."""
        return bool(self._read()[3])

    @property
    def sums(self) -> list[float]:
        """Values passed to the step as `Update.sums`, summed over all ranks."""
        return self._read()[4:]

    @property
    def scale_overflow(self) -> bool:
        """True if this was an fp16 overflow that a lower loss scale can fix.

        False in two cases: an element of `sums` is not finite, which a lower scale cannot change, because the loss
        scale does not multiply `sums`; or the loss scale is at its minimum.
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
    """Return the object that updates the shards in host memory. Return None if no shards are in host memory."""
    if not shards:
        return None
    assert config.host_store is not None
    update = HOST_MEMORY[config.host_store].update(config, shards, chains, threads)
    assert isinstance(update, HostUpdateRule), f"{config.host_store} makes no update"
    return update


Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that decides whether to skip a step's update. A judge takes the gradient norm, the overflow flag and the
step's sums, and returns two flags. The first flag of a judge is 1 to skip the update. The second flag of a judge is 1
if the step is a spike, that is, if the loss or norm is unusually large. All arguments and results are float64 tensors
on the device."""


@dataclass(frozen=True)
class Update:
    """Arguments of one step of `DistributedOptimizer`. To repeat an update, pass the same object again."""

    rates: Rates

    factor: Tensor | None = None
    """Factor by which the gradients must still be multiplied, as returned by `reduce_model_grads`."""

    sums: Tensor | None = None
    """Additional float64 values [n] of this rank, such as the loss. The values of all ranks are summed together with
    the gradient norm. A sum that is not finite counts as an overflow."""

    judge: Judge | None = None
    """Function that decides whether to skip the update."""

    on_update: Callable[[Tensor], None] | None = None
    """Function that is called after the update and before the parameters are gathered, for example to update the scales
    with which weights are cast. `on_update` receives `skip`, which is 1 if the update was skipped."""


class DistributedOptimizer:
    """Optimizer that is selected by --optimizer. The optimizer updates this rank's shards of main parameters, which are
    on the device or on the host.

    All ranks of the world must make the same calls. The parameters must have their initial values before the optimizer
    is created. Raises ValueError if `config` and `ddp` disagree on `use_distributed_optimizer`.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        ddp: DistributedDataParallel,
        state: ParallelState,
        host_threads: int | None = None,
    ) -> None:
        """Create the optimizer. `host_threads` threads update the states in host memory; by default, as many as
        `torch.get_num_threads()`."""
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
        """Hooks called after each update of main parameters on the device, before the parameters are written.

        Each hook receives a scalar tensor on the device that is 1 if the update was skipped, else 0. A training
        callback may append hooks in its `meters` method.
        """
        self.updates = torch.zeros((), dtype=torch.float64, device=ddp.device)
        """Number of updates so far, as a tensor on the device."""

    @torch.no_grad()
    def step(self, update: Update) -> StepResult:
        """Update the parameters once. The gradients must be final, except for the factor that `reduce_model_grads`
        returns. Most optimizers multiply the gradients by the factor of `reduce_model_grads`, and by the clipping
        factor, in place. Fused optimizers instead apply both factors while they read the gradients.

        With `overlap_param_gather`, the all-gather of the updated parameters is still in flight when this method
        returns. Forward passes and `finish_param_sync` wait for the gathered parameters. If `ddp` has a `param_gather`,
        some parameters are gathered in another number format. In this case, only `finish_param_sync` gathers all
        parameters in the parameters' dtype.
        """
        # Modules that have not run since the last step have not yet waited for their parameters.
        self.ddp.wait_param_sync()
        if self.host_update is not None:
            self.host_update.start()
        result = StepResult(self.scaler.scale, self.scaler.can_fall)
        self.begin_update(update, self.grad_norm.own(update.sums), result)
        return result

    def begin_update(self, update: Update, own: Tensor, result: StepResult) -> None:
        """Wait for the gradient norm, and then update the shards. `own` is the contribution of this rank to the norm. A
        subclass may postpone a part of the update to `end_update`."""
        self.apply(update, *self.verdict(update, self.grad_norm.start(own).wait(), result))
        if self.scaler.dynamic:
            self.scaler.update(not result.finite)

    def end_update(self) -> None:
        """End the update that the last `step` started, so that its result can be read. All ranks must call this
        method."""

    def verdict(self, update: Update, summed: Tensor, result: StepResult) -> tuple[Tensor, Tensor | None]:
        """Return the skip flag (1 to skip the update, else 0) and the clipping factor. The clipping factor is at most
        1, and reduces the gradient norm to --clip-grad. If clipping is off, the factor is None.

        Settles the result. `summed` is the result of the all-reduce that `GradNorm.start` launched.
        """
        norm, overflow, sums = self.grad_norm.finish(summed, update.factor)
        judge = update.judge
        refused, spike = (torch.zeros_like(overflow),) * 2 if judge is None else judge(norm, overflow, sums)
        skip = torch.maximum(overflow, refused)
        result.settle(torch.cat([torch.stack([norm, overflow, skip, spike]), sums]))
        limit = self.config.clip_grad
        return skip, (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else None

    def apply(self, update: Update, skip: Tensor, coefficient: Tensor | None) -> None:
        """Update the optimizer states and the parameters, unless `skip` is 1. After the update, start gathering the
        parameters."""
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
        """Return the buckets that are updated entirely on the device. The parameters of these buckets can be gathered
        before the host has updated its shards."""
        if self.ddp.param_gather is not None:
            return set()
        return set(self.ddp.buckets) - {shard.bucket for shard in self.shards if shard.on_host}

    @property
    def loss_scale(self) -> float:
        """Factor by which the losses of the next step are multiplied. The factor is 1 unless the run trains in fp16."""
        return self.scaler.scale

    @property
    def step_count(self) -> int:
        """Number of updates so far, also used in Adam's bias correction; skipped steps do not count. The host waits for
        the device when it reads this property."""
        return int(self.updates.item())

    @step_count.setter
    def step_count(self, value: int) -> None:
        self.updates.fill_(value)
        for chain in self.chains:
            chain.set_step_count(value)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Memory in bytes that main parameters and states take on the device, and in host memory. The size in host
        memory includes transfer buffers."""
        device, host = (sum(sum(s.nbytes) for s in self.shards if s.on_host == place) for place in (False, True))
        device += sum(chain.nbytes for chain in self.chains if not chain.on_host)
        host += sum(chain.nbytes for chain in self.chains if chain.on_host)
        return device, host + (0 if self.host_update is None else self.host_update.nbytes)

    def sharded_state(self) -> list[OptimizerPiece]:
        """Return all parameters and states that this rank owns, for reading. The result contains views of the live
        tensors. States with scales are copied to the host instead.

        If the model parameters themselves serve as main parameters, no separate main parameters are returned.
        """
        self.finish_param_sync()
        return [*(piece for shard in self.shards for piece in shard.pieces(shard.exported())), *self._of_chain()]

    def _of_chain(self) -> Iterator[OptimizerPiece]:
        return (piece for chain in self.chains for piece in chain.pieces())

    @contextmanager
    def loading_state(self) -> Iterator[list[OptimizerPiece]]:
        """Context manager that yields the tensors of `sharded_state` for writing. The optimizer uses the written values
        from the end of the block on. Set `step_count` as well."""
        self.finish_param_sync()
        exported = [(shard, shard.exported()) for shard in self.shards]
        yield [*(piece for shard, tensors in exported for piece in shard.pieces(tensors)), *self._of_chain()]
        for shard, tensors in exported:
            shard.take_up(tensors)
        if any(shard.changes_params_when_loaded for shard in self.shards):
            self.ddp.start_param_sync()
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until the last update is complete and all parameters have been gathered. Before parameters are read
        outside of a forward pass, this method must be called.
        """
        self.end_update()
        self.ddp.finish_param_sync()
