"""Adam with averaged weights: the state `averaged` is an exponential moving average of the weights.

python pretrain_gpt.py --extension examples/averaged_adam.py --optimizer averaged_adam --average-decay 0.999 ...
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.optimizer.fused import FusedAdam
from megatron.core.optimizer.transforms import AverageWeights, Transform
from megatron.core.param_meta import ParamMeta
from megatron.training.extensions import extension_flags


@extension_flags("averaged weights")
@dataclass(frozen=True)
class AverageConfig:
    average_decay: float = flag(0.999, at_least=0, below=1)
    """Decay of the average of the weights."""


@OPTIMIZERS.register("averaged_adam", by_element=True)
def averaged_adam(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    decay = config.options(AverageConfig).average_decay
    return [FusedAdam(config), AverageWeights(decay)]
