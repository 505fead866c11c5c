"""AdEMAMix (arXiv:2409.03137): Adam with a second, slow average of gradients, which remembers ten thousand steps.

python pretrain_gpt.py --extension examples/ademamix.py --optimizer ademamix --ademamix-alpha 5 ...
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parts import OPTIMIZERS
from megatron.training.extensions import extension_flags


@extension_flags("AdEMAMix")
@dataclass(frozen=True)
class AdEMAMixConfig:
    ademamix_alpha: float = 5.0
    """Weight of the slow average in an update."""
    ademamix_beta3: float = 0.9999
    """Decay of the slow average."""


@OPTIMIZERS.register("ademamix", states=("exp_avg", "exp_avg_slow", "exp_avg_sq"))
class AdEMAMix(Optimizer):
    def update(
        self, param: Tensor, grad: Tensor, states: Mapping[str, Tensor], lr: float, weight_decay: float, step: Tensor
    ) -> None:
        config, options = self.config, self.config.options(AdEMAMixConfig)
        fast, slow, square = states["exp_avg"], states["exp_avg_slow"], states["exp_avg_sq"]
        fast.lerp_(grad, 1 - config.adam_beta1)
        slow.lerp_(grad, 1 - options.ademamix_beta3)
        square.lerp_(grad.square(), 1 - config.adam_beta2)
        scale = (square / (1 - config.adam_beta2**step)).sqrt_().add_(config.adam_eps)
        moved = fast / (1 - config.adam_beta1**step) + options.ademamix_alpha * slow
        param.sub_(lr * (moved / scale + weight_decay * param))
