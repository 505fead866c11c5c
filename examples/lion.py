"""Lion optimizer (arXiv:2302.06675). An update is the sign of an average of gradients. The optimizer stores one state
tensor for each parameter.

python pretrain_gpt.py --optimizer lion --lr 3e-5 --weight-decay 0.3 ...
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.optimizer.transforms import AddDecay, ParameterUpdate, ScaleByRate, State, Transform, elements
from megatron.core.param_meta import ParamMeta
from megatron.training.extensions import extension_flags


@extension_flags("Lion")
@dataclass(frozen=True)
class LionConfig:
    lion_beta1: float = 0.95
    """Weight of the average when it is mixed with the current gradient to compute an update."""
    lion_beta2: float = 0.98
    """Decay of the average of gradients."""


class SignOfAverage(Transform):
    def __init__(self, options: LionConfig) -> None:
        self.options = options

    def states(self, meta: ParamMeta) -> Sequence[State]:
        return [elements("exp_avg", meta)]

    def update(self, x: ParameterUpdate) -> None:
        average, grad = x.states["exp_avg"], x.update
        x.update = average.lerp(grad, 1 - self.options.lion_beta1).sign_()
        average.lerp_(grad, 1 - self.options.lion_beta2)


@OPTIMIZERS.register("lion", by_element=True)
def lion(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    return [SignOfAverage(config.options(LionConfig)), AddDecay(), ScaleByRate()]
