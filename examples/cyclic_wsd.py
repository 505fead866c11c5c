"""Cyclic WSD learning-rate schedule (WSD-S, arXiv:2410.05192). In each cycle, the learning rate is constant, anneals,
and then returns to the constant value.

python pretrain_gpt.py --extension examples/cyclic_wsd.py --lr-decay-style cyclic-wsd --lr-cycles 3 ...
"""

from dataclasses import dataclass

from megatron.core.config import OptimizerConfig
from megatron.core.config.optimizers import LR_SCHEDULES
from megatron.core.optimizer.param_scheduler import ScheduleLength
from megatron.training.extensions import extension_flags


@extension_flags("cyclic WSD", may_change=True)
@dataclass(frozen=True)
class CyclicConfig:
    lr_cycles: int = 3
    """Number of cycles. In each cycle, the learning rate anneals to --min-lr. A checkpoint from the end of a cycle can
    be used as a finished model."""
    lr_anneal_share: float = 0.1
    """Fraction of each cycle during which the learning rate anneals."""


@LR_SCHEDULES.register("cyclic-wsd")
def cyclic_wsd(samples: float, length: ScheduleLength, config: OptimizerConfig) -> float:
    options, peak = config.options(CyclicConfig), config.lr or 0.0
    place = (samples - length.warmup) / (length.decay - length.warmup) * options.lr_cycles
    into_anneal = 1 - (1 - place % 1) / options.lr_anneal_share if place < options.lr_cycles else 1.0
    return peak - max(into_anneal, 0.0) * (peak - config.min_lr)
