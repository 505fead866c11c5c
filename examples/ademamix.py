"""AdEMAMix (arXiv:2409.03137): Adam with a second moving average of gradients, which covers about ten thousand steps.

python pretrain_gpt.py --extension examples/ademamix.py --optimizer ademamix --ademamix-alpha 5 ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.optimizer.transforms import AddDecay, ParameterUpdate, ScaleByRate, State, Transform, elements
from megatron.core.param_meta import ParamMeta
from megatron.training.extensions import extension_flags


@extension_flags("AdEMAMix")
@dataclass(frozen=True)
class AdEMAMixConfig:
    ademamix_alpha: float = 5.0
    """Weight of the slow average in an update."""
    ademamix_beta3: float = 0.9999
    """Decay of the slow average."""
    ademamix_alpha_warmup: int = 0
    """Number of updates during which alpha rises linearly from 0 to its final value."""
    ademamix_beta3_warmup: int = 0
    """Number of updates during which beta3 rises from --adam-beta1 to its final value. The half-life of the average
    rises linearly."""

    def at(self, step: Tensor, beta1: float) -> tuple[Tensor | float, Tensor | float]:
        """Return alpha and beta3 for the update number `step` (section 3.1 of the paper)."""
        alpha: Tensor | float = self.ademamix_alpha
        beta3: Tensor | float = self.ademamix_beta3
        if self.ademamix_alpha_warmup:
            alpha = alpha * (step / self.ademamix_alpha_warmup).clamp(max=1)
        if self.ademamix_beta3_warmup:
            share, first, last = (step / self.ademamix_beta3_warmup).clamp(max=1), log(beta1), log(self.ademamix_beta3)
            beta3 = (first * last / ((1 - share) * last + share * first)).exp()
        return alpha, beta3


class AdEMAMix(Transform):
    def __init__(self, config: OptimizerConfig) -> None:
        self.config, self.options = config, config.options(AdEMAMixConfig)

    def states(self, meta: ParamMeta) -> Sequence[State]:
        return [elements(name, meta) for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq")]

    def update(self, x: ParameterUpdate) -> None:
        config, states, grad, step = self.config, x.states, x.update, x.step
        fast, slow, square = states["exp_avg"], states["exp_avg_slow"], states["exp_avg_sq"]
        fast.lerp_(grad, 1 - config.adam_beta1)
        alpha, beta3 = self.options.at(step, config.adam_beta1)
        slow.mul_(beta3).add_((1 - beta3) * grad)
        square.lerp_(grad.square(), 1 - config.adam_beta2)
        scale = (square / (1 - config.adam_beta2**step)).sqrt_().add_(config.adam_eps)
        x.update = (fast / (1 - config.adam_beta1**step) + alpha * slow) / scale


@OPTIMIZERS.register("ademamix", by_element=True)
def ademamix(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    return [AdEMAMix(config), AddDecay(), ScaleByRate()]
