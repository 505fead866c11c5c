"""Function that the optimizer calls to compute the learning rate of --lr-schedule. This module does not import
torch."""

from __future__ import annotations

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.param_scheduler import ScheduleLength
from megatron.extensions.optim.schedules.flags import ScheduleFlags
from megatron.extensions.optim.schedules.pieces import Rates, parse, rate_at


def pieces(samples: float, length: ScheduleLength, config: OptimizerConfig) -> float:
    """Return the learning rate of --lr-schedule after `samples` consumed samples. The total length of the schedule is
    `length.decay`."""
    text = config.options(ScheduleFlags).lr_schedule
    assert text is not None and config.lr is not None
    rates = Rates(config.lr_warmup_init, config.lr, config.min_lr)
    return rate_at(parse(text), samples, length.decay, rates)
