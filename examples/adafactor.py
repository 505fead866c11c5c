"""Adafactor (arXiv:1804.04235), an optimizer that stores only the row means and column means of a matrix's second
moment.

python pretrain_gpt.py --extension examples/adafactor.py --optimizer adafactor --lr 1e-2 ...

On a single process, updates of matrices [rows, columns] equal those of torch.optim.Adafactor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.optimizer.transforms import ParameterUpdate, Requests, State, Transform, elements, reduced, together
from megatron.core.param_meta import ParamMeta
from megatron.training.extensions import extension_flags


@extension_flags("Adafactor")
@dataclass(frozen=True)
class AdafactorConfig:
    adafactor_beta2_decay: float = -0.8
    """Exponent d of the second-moment decay. An update mixes the new squared gradient into the average with the weight
    step**d."""
    adafactor_clip: float = 1.0
    """Maximum root mean square of an update before the update is multiplied by the learning rate."""
    adafactor_least_scale: float = 1e-3
    """Minimum parameter scale. The learning rate is multiplied by the root mean square of the parameter or by this
    value, whichever is larger."""


class Adafactor(Transform):
    def __init__(self, config: OptimizerConfig) -> None:
        self.options = config.options(AdafactorConfig)

    def states(self, meta: ParamMeta) -> Sequence[State]:
        if not meta.matrix:
            return [elements("variance", meta)]
        row_dims = range(meta.stacked, len(meta.global_shape) - 1)
        return [reduced("row_var", meta, -1), reduced("col_var", meta, *row_dims)]

    def update(self, x: ParameterUpdate) -> Requests:
        options, square, weight = self.options, x.update.square(), x.step**self.options.adafactor_beta2_decay
        least = torch.finfo(square.dtype).eps

        def average(old: Tensor, new: Tensor) -> Tensor:
            return old + (new - old) * weight

        if x.meta.matrix:
            sums = x.fold("row_var", square, average), x.fold("col_var", square, average)
            rows, columns = yield from together(*sums)
            row_dims = list(range(x.meta.stacked, rows.dim() - 1))
            rows = rows / rows.mean(row_dims, keepdim=True).clamp(min=least)
            variance = x.spread(rows) * x.spread(columns)
        else:
            variance = x.states["variance"]
            variance.copy_(average(variance, square))
        direction = x.update * variance.clamp(min=least**2).rsqrt()
        size, scale = yield from together(x.mean(direction.square()), x.mean(x.param.square()))
        rate = (1 / x.step.sqrt()).clamp(max=x.lr) * scale.sqrt().clamp(min=options.adafactor_least_scale)
        rate = rate / (size.sqrt() / options.adafactor_clip).clamp(min=1.0)
        x.update = -rate * direction - x.lr * x.weight_decay * x.param


@OPTIMIZERS.register("adafactor")
def adafactor(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    return [Adafactor(config)]
