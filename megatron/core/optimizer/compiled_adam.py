"""AdamW update that torch.compile fuses into a single kernel. The kernel also writes the 16-bit model parameters. In
comparison, torch's fused AdamW writes the scaled gradients back to memory, and a separate copy must read the main
parameters again to write the model parameters. These two steps account for 8 of the 38 bytes per element that the
update with torch's kernel reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.distributed.param_layout import ALIGNMENT
from megatron.core.optimizer.optimizer import OptimizerShard, ShardUpdate, StepValues

STATIC_SHAPES = 16
"""Maximum number of different shard shapes for which a separate kernel is compiled for each shape. With more shapes,
kernels for dynamic shapes are compiled. The maximum is rarely exceeded, because the shards of identical layers have the
same shape."""


class CompiledAdamKernel(ShardUpdate):
    """AdamW update of shards with fp32 main parameters. The compiled function `adamw_` is called once for each
    shard."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[OptimizerShard]) -> None:
        self.config = config
        self.shards = shards
        for shard in shards:
            shard.written_by_update = True
        self._factor: Tensor | None = None
        """Factor by which the next step multiplies the gradients, or None for a factor of 1."""

    def scale_gradients(self, factor: Tensor) -> None:
        self._factor = factor

    def step(self, values: StepValues) -> None:
        betas = self.config.adam_beta1, self.config.adam_beta2
        shapes = {(shard.main.shape, shard.aliased) for shard in self.shards}
        update = region(adamw_, True, static=len(shapes) <= STATIC_SHAPES)
        scalars = {
            group: self._scalars(*values.rates.of(group), values.skip, values.updates)
            for group in dict.fromkeys(shard.group for shard in self.shards)
        }
        for shard in self.shards:
            tensors = shard.main, shard.grads, shard.states["exp_avg"], shard.states["exp_avg_sq"]
            # The tensors are viewed as rows of `ALIGNMENT` elements, so that the compiled kernel can assume that every
            # row is aligned.
            main, grad, first, second = (tensor.detach().view(-1, ALIGNMENT) for tensor in tensors)
            params = None if shard.aliased else shard.params.view(-1, ALIGNMENT)
            eps = self.config.adam_eps * shard.group.eps_mult
            update(main, grad, first, second, params, scalars[shard.group], betas, eps)
        self._factor = None

    def _scalars(self, lr: float, weight_decay: float, skip: Tensor, updates: Tensor) -> AdamScalars:
        """Compute the scalar inputs of an update. `updates` is the number of earlier updates. `skip` and `updates` are
        float64 scalar tensors on the device."""
        first, second = (1.0 - beta ** (updates + 1.0) for beta in (self.config.adam_beta1, self.config.adam_beta2))
        factor = torch.ones_like(skip) if self._factor is None else self._factor
        values = factor, skip, torch.full_like(skip, 1.0 - lr * weight_decay), lr / first, second.sqrt()
        return AdamScalars(*(value.to(torch.float32) for value in values))


class AdamScalars(NamedTuple):
    """Scalar inputs of an Adam update. Each value is an fp32 scalar tensor on the device, so that changing it neither
    triggers a recompilation nor makes the host wait."""

    factor: Tensor
    """Factor by which the update multiplies the gradients."""

    skip: Tensor
    """Flag that is 1 if the update is skipped, else 0."""

    decay: Tensor
    """Factor by which weight decay multiplies the main parameters: 1 - learning rate * weight decay."""

    step_size: Tensor
    """Learning rate divided by the bias correction of the first moment."""

    correction: Tensor
    """Square root of the bias correction of the second moment."""


def adamw_(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: Tensor | None,
    scalars: AdamScalars,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Perform one AdamW update in place (arXiv 1711.05101, algorithm 2). `main`, `grad`, `exp_avg` and `exp_avg_sq`
    must be fp32 tensors of the same shape.

    Args:
        main: Main parameters.
        grad: Gradient. The function does not modify it.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        params: Model parameters, to which the new main parameters are copied and rounded. None if the main parameters
            share the memory of the model parameters.
        scalars: Scalar inputs of this update.
        betas: Decay rates of the first and the second moment.
        eps: Epsilon that is added to the square root of the second moment.
    """
    keeps = scalars.skip > 0
    g = grad * scalars.factor
    m = torch.lerp(exp_avg, g, 1.0 - betas[0])
    v = torch.lerp(exp_avg_sq, g * g, 1.0 - betas[1])
    new = main * scalars.decay - scalars.step_size * m / (v.sqrt() / scalars.correction + eps)
    new = torch.where(keeps, main, new)
    exp_avg.copy_(torch.where(keeps, exp_avg, m))
    exp_avg_sq.copy_(torch.where(keeps, exp_avg_sq, v))
    main.copy_(new)
    if params is not None:
        params.copy_(new)
