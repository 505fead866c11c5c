"""Adam optimizer that also maintains averaged weights. The optimizer state `averaged` is an exponential moving average
of the weights.

python pretrain_gpt.py --extension examples/averaged_adam.py --optimizer averaged_adam --average-decay 0.999 ...

With --eval-averaged, evaluations use the averaged weights. Training always continues from the weights that are not
averaged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.optimizer.fused import FusedAdam
from megatron.core.optimizer.transforms import AverageWeights, Transform
from megatron.core.param_meta import ParamMeta
from megatron.training.extensions import CALLBACKS, extension_flags
from megatron.training.hooks import Callback, RunView


@extension_flags("averaged weights")
@dataclass(frozen=True)
class AverageConfig:
    average_decay: float = flag(0.999, at_least=0, below=1)
    """Decay of the average of the weights."""

    eval_averaged: bool = flag(False, no_effect_without="--optimizer averaged_adam")
    """Evaluate the averaged weights in place of those that are trained."""


@OPTIMIZERS.register("averaged_adam", by_element=True)
def averaged_adam(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    decay = config.options(AverageConfig).average_decay
    return [FusedAdam(config), AverageWeights(decay)]


@CALLBACKS.register("averaged weights", when=lambda config: config.options(AverageConfig).eval_averaged)
class EvaluateAveraged(Callback):
    def evaluation_weights(self, run: RunView) -> Iterable[OptimizerPiece] | None:
        if run.optimizer.step_count == 0:  # before the first update there are no averaged weights
            return None
        return [piece for piece in run.optimizer.sharded_state() if piece.key == "averaged"]
