"""The optimizer: clips, updates main-precision shards, and makes the parameters whole again.

A step never waits for the device, except to move a dynamic loss scale. A gradient that is not finite leaves
parameters and moments untouched, in every precision: the update kernels read the overflow flag on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.config import OptimizerConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.clip_grads import GradNorm, clip_coefficient
from megatron.core.optimizer.distrib_optimizer import OptimizerShard
from megatron.core.optimizer.grad_scaler import LossScaler, build_loss_scaler
from megatron.core.parallel_state import ParallelState
from megatron.core.sharded_piece import OptimizerPiece


class StepResult:
    """What a step did. Reading a value waits for the device, once."""

    def __init__(self, norm: Tensor, overflow: Tensor, loss_scale: float) -> None:
        self._values: Tensor | list[float] = torch.stack([norm, overflow])
        self.loss_scale = loss_scale
        """Loss scale that the step's gradients were computed with."""

    def _read(self) -> list[float]:
        if isinstance(self._values, Tensor):
            self._values = self._values.tolist()
        return self._values

    @property
    def grad_norm(self) -> float:
        """Norm over the whole model before clipping; not finite if `skipped`."""
        return self._read()[0]

    @property
    def skipped(self) -> bool:
        """Whether a gradient was infinite or NaN, so that nothing was updated."""
        return bool(self._read()[1])


class MixedPrecisionOptimizer:
    """AdamW or SGD over the main-precision shards of one rank.

    Collective over the world: every rank makes the same calls. Build it after the parameters have their initial
    values, or call `reload_main_from_params` once they have.
    """

    def __init__(
        self, config: OptimizerConfig, ddp: DistributedDataParallel, state: ParallelState, scaler: LossScaler
    ) -> None:
        self.config, self.ddp, self.scaler = config, ddp, scaler
        self._grad_norm = GradNorm(ddp.buckets, state, ddp.device)
        moments = _moment_names(config)
        self.shards: list[OptimizerShard] = []
        groups = []
        for buffer in ddp.buffers:
            shards = [OptimizerShard(bucket, moments) for bucket in buffer.buckets]
            groups.append({"params": [shard.main for shard in shards], "decays": buffer.layout.decays})
            self.shards += shards
        self._torch = _torch_optimizer(config, groups)
        for shard in self.shards:
            self._torch.state[shard.main].update(shard.moments)
            if config.optimizer == "adam":
                self._torch.state[shard.main]["step"] = torch.zeros((), dtype=torch.float32, device=shard.main.device)
        self._updates = torch.zeros((), dtype=torch.float64, device=ddp.device)
        self._skipped = torch.zeros_like(self._updates)

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> StepResult:
        """One update from the finished gradients (`finalize_model_grads`), which clipping scales in place.

        With `overlap_param_gather` the parameters are whole again only when a forward pass has waited for them, or
        `finish_param_sync`.
        """
        self.finish_param_sync()  # modules that did not run since the last step have not waited
        norm, overflow = self._grad_norm()
        if self.config.clip_grad > 0 and self.shards:
            coefficient = clip_coefficient(norm, self.config.clip_grad).to(self.ddp.main_dtype)
            torch._foreach_mul_([shard.bucket.owned_grads for shard in self.shards], coefficient)
        for group in self._torch.param_groups:
            group["lr"], group["weight_decay"] = lr, weight_decay if group["decays"] else 0.0
        self._torch.found_inf = overflow.to(torch.float32)  # type: ignore[attr-defined]
        self._torch.step()
        self._updates += 1.0 - overflow
        self._skipped += overflow
        self._start_param_sync()
        if not self.ddp.config.overlap_param_gather:
            self.finish_param_sync()
        result = StepResult(norm, overflow, self.scaler.scale)
        if self.scaler.dynamic:
            self.scaler.update(result.skipped)
        return result

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self.ddp.zero_grad_buffer()

    @property
    def loss_scale(self) -> float:
        """Factor for the next step's losses; 1 but in fp16."""
        return self.scaler.scale

    @property
    def skipped_steps(self) -> int:
        """Steps since the start or load that a gradient which was not finite has cost. Waits for the device."""
        return int(self._skipped.item())

    @property
    def step_count(self) -> int:
        """Updates made so far, in Adam's bias correction too; skipped steps do not count. Waits for the device."""
        return int(self._updates.item())

    @step_count.setter
    def step_count(self, value: int) -> None:
        self._updates.fill_(value)
        for state in self._torch.state.values():
            if "step" in state:
                state["step"].fill_(value)

    def sharded_state(self) -> list[OptimizerPiece]:
        """Live views of everything this rank owns; load in place, set `step_count`, then
        `reload_params_from_main`. Main parameters are left out where the parameters are the main parameters."""
        self.finish_param_sync()
        return [piece for shard in self.shards for piece in shard.pieces()]

    @torch.no_grad()
    def reload_params_from_main(self) -> None:
        """Makes the parameters, on all ranks, the rounded main parameters. Collective."""
        self.finish_param_sync()
        self._start_param_sync()
        self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Waits until the parameters are whole: for whoever reads them outside of a forward pass."""
        self.ddp.finish_param_sync()

    def _start_param_sync(self) -> None:
        for shard in self.shards:
            shard.write_params()
        self.ddp.start_param_sync()

    @torch.no_grad()
    def reload_main_from_params(self) -> None:
        """Makes the main parameters the parameters, after those alone were loaded or initialised."""
        for shard in self.shards:
            shard.read_params()


def build_optimizer(
    config: OptimizerConfig, ddp: DistributedDataParallel, state: ParallelState
) -> MixedPrecisionOptimizer:
    """The optimizer of a run, with its loss scaler."""
    if config.use_distributed_optimizer != ddp.use_distributed_optimizer:
        raise ValueError(
            f"use_distributed_optimizer is {config.use_distributed_optimizer} in OptimizerConfig and "
            f"{ddp.use_distributed_optimizer} in DistributedDataParallel; give both the same"
        )
    return MixedPrecisionOptimizer(config, ddp, state, build_loss_scaler(config, ddp.parallel_config.fp16))


def _moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq") if config.optimizer == "adam" else ("momentum_buffer",)


def _torch_optimizer(config: OptimizerConfig, groups: list[dict]) -> torch.optim.Optimizer:
    """torch's fused kernels, which CPU and CUDA both have: they take the overflow flag as a tensor."""
    if not groups:  # a pipeline stage without parameters
        groups = [{"params": [torch.zeros(0)], "decays": False}]
    if config.optimizer == "adam":
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
    return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
