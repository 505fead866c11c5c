"""Fused links of optimizer chains (`FusedTransform`), which update whole shards in one pass over their memory.

The function `fused_link` selects the fused link for the parameters of a buffer. `FusedAdam` and `FusedSGD` are the
fused links of Adam and SGD, which call torch's fused kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.param_groups import ParamGroup
from megatron.core.distributed.param_layout import BufferLayout
from megatron.core.optimizer.compiled_adam import CompiledAdamKernel
from megatron.core.optimizer.optimizer import OptimizerShard, Shard, ShardUpdate, StepValues, scale_gradients_
from megatron.core.optimizer.planned_states import State, elements
from megatron.core.optimizer.transforms import FusedTransform, StageOfUpdate, Transform, chain_of
from megatron.core.param_meta import ParamMeta


@dataclass(frozen=True)
class FusedPart:
    """Kernel of one fused link (`FusedTransform`), and the shards that the kernel updates."""

    kernel: ShardUpdate
    shards: Sequence[Shard]


def fused_link(config: OptimizerConfig, layout: BufferLayout) -> FusedTransform | None:
    """Return the fused link (`FusedTransform`) that the chains of all parameters of a buffer have in common, or None if
    the chains have no fused link. The function raises ValueError if the chains have different fused links."""
    found: dict[type[Transform] | None, FusedTransform | None] = {}
    for param in layout.params:
        fused = [link for link in chain_of(config, param.meta) if isinstance(link, FusedTransform)]
        found.setdefault(type(fused[0]) if fused else None, fused[0] if fused else None)
    if len(found) > 1:
        names = " and ".join("no fused link" if kind is None else kind.__name__ for kind in found)
        raise ValueError(
            f"--optimizer {config.optimizer}: parameters of the same buffer have {names}, but must have the same fused "
            "link; use the same link in all chains, or register the optimizer with whole_roles, so that these matrices "
            "have separate buffers"
        )
    return next(iter(found.values()), None)


def states_of_shards(config: OptimizerConfig, layout: BufferLayout) -> Sequence[State]:
    """Return the optimizer states that the fused link (`FusedTransform`) of a buffer keeps. These states are stored
    next to the main parameters of the buffer and cover the padding of the buffer as well."""
    fused = fused_link(config, layout)
    return () if fused is None else fused.states(layout.params[0].meta)


def fused_parts(config: OptimizerConfig, shards: Sequence[Shard], stage: StageOfUpdate) -> list[FusedPart]:
    """Return the kernels of all fused links of a stage. If `shards` are in host memory, omit the kernels that would not
    update any of these shards."""
    links: dict[type[FusedTransform], FusedTransform] = {}
    members: dict[type[FusedTransform], list[Shard]] = {}
    on_host = any(shard.on_host for shard in shards)
    for layout in stage.layouts:
        own = [shard for shard in shards if shard.layout is layout]
        link = fused_link(config, layout)
        if link is not None and (own or not on_host):
            links.setdefault(type(link), link)
            members.setdefault(type(link), []).extend(own)
    return [FusedPart(link.kernel(members[kind], stage), members[kind]) for kind, link in links.items()]


class FusedAdam(FusedTransform):
    """Adam with decoupled weight decay (arXiv 1711.05101). One kernel updates the moments, applies the weight decay and
    updates the parameters.

    If `stage.compiled` is True, fp32 main parameters are updated by `CompiledAdamKernel`, which also writes the model
    parameters.
    """

    def states(self, meta: ParamMeta) -> Sequence[State]:
        return [elements("exp_avg", meta), elements("exp_avg_sq", meta)]

    def kernel(self, shards: Sequence[Shard], stage: StageOfUpdate) -> ShardUpdate:
        own = plain_shards(shards)
        if stage.compiled and own and all(shard.main.itemsize == 4 for shard in own):
            return CompiledAdamKernel(self.config, own)
        return AdamKernel(self.config, own)


class FusedSGD(FusedTransform):
    """SGD with momentum, computed by one kernel."""

    def states(self, meta: ParamMeta) -> Sequence[State]:
        return [elements("momentum_buffer", meta)]

    def kernel(self, shards: Sequence[Shard], stage: StageOfUpdate) -> ShardUpdate:
        return SGDKernel(self.config, plain_shards(shards))


def plain_shards(shards: Sequence[Shard]) -> list[OptimizerShard]:
    """Return the shards, after checking that their main parameters and states are plain tensors (`OptimizerShard`)."""
    plain = [shard for shard in shards if isinstance(shard, OptimizerShard)]
    assert len(plain) == len(shards), "this kernel supports only shards with plain tensors as states"
    return plain


class TorchKernel(ShardUpdate):
    """Kernel that calls one of torch's fused optimizers. These optimizers are available on CPU and CUDA, and accept the
    overflow flag as a tensor."""

    def __init__(self, shards: Sequence[OptimizerShard], fused: torch.optim.Optimizer) -> None:
        self.shards = shards
        self._torch = fused
        for shard in shards:
            fused.state[shard.main].update(shard.states)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients that the next step reads by `factor`.

        torch's fused kernels divide each gradient by the float32 scalar `grad_scale` while they read it, and store the
        quotient. A float32 scalar is not precise enough for float64 gradients, so float64 gradients are multiplied by
        `factor` in a separate step.
        """
        if any(shard.main.dtype == torch.float64 for shard in self.shards):
            scale_gradients_(self.shards, factor)
        else:
            self._torch.grad_scale = factor.reciprocal().to(torch.float32)  # type: ignore[attr-defined]

    def step(self, values: StepValues) -> None:
        for group in self._torch.param_groups:
            group["lr"], group["weight_decay"] = values.rates.of(group["group"])
        self._torch.found_inf = values.skip.to(torch.float32)  # type: ignore[attr-defined]
        self._torch.step()
        self._torch.grad_scale = None  # type: ignore[attr-defined]


class AdamKernel(TorchKernel):
    """Kernel that updates shards with `torch.optim.AdamW`."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[OptimizerShard]) -> None:
        betas = (config.adam_beta1, config.adam_beta2)
        groups = [{"eps": config.adam_eps * each["group"].eps_mult, **each} for each in _groups(shards)]
        super().__init__(shards, torch.optim.AdamW(groups, 0.0, betas, fused=True))
        for shard in shards:
            step = torch.zeros((), dtype=torch.float32, device=shard.main.device)
            self._torch.state[shard.main]["step"] = step

    def set_step_count(self, updates: int) -> None:
        for state in self._torch.state.values():
            state["step"].fill_(updates)


class SGDKernel(TorchKernel):
    """Kernel that updates shards with `torch.optim.SGD`."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[OptimizerShard]) -> None:
        super().__init__(shards, torch.optim.SGD(_groups(shards), 0.0, config.sgd_momentum, fused=True))


def _groups(shards: Sequence[OptimizerShard]) -> list[dict]:
    """Return one dictionary per parameter group with the group's main parameters, as torch's optimizers expect for
    their argument `params`."""
    groups: dict[ParamGroup, list[Tensor]] = {}
    for shard in shards:
        groups.setdefault(shard.group, []).append(shard.main)
    if not groups:  # torch requires at least one parameter, but a pipeline stage may have none
        groups[ParamGroup()] = [torch.zeros(0)]
    return [{"params": params, "group": group} for group, params in groups.items()]


def adam(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    """--optimizer adam."""
    return [FusedAdam(config)]


def sgd(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    """--optimizer sgd."""
    return [FusedSGD(config)]
