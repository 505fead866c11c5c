"""Lion (arXiv:2302.06675): steps by the sign of an average of gradients, with one state for each parameter.

python pretrain_gpt.py --optimizer lion --lr 3e-5 --weight-decay 0.3 ...
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parts import OPTIMIZERS
from megatron.training.extensions import extension_flags


@extension_flags("Lion")
@dataclass(frozen=True)
class LionConfig:
    lion_beta1: float = 0.95
    """Weight of the average in an update, beside the gradient."""
    lion_beta2: float = 0.98
    """Decay of the average."""


@OPTIMIZERS.register("lion", states=("exp_avg",))
class Lion(Optimizer):
    def update(
        self, param: Tensor, grad: Tensor, states: Mapping[str, Tensor], lr: float, weight_decay: float, step: Tensor
    ) -> None:
        options, average = self.config.options(LionConfig), states["exp_avg"]
        direction = average.lerp(grad, 1 - options.lion_beta1).sign_()
        average.lerp_(grad, 1 - options.lion_beta2)
        param.sub_(lr * (direction + weight_decay * param))
