"""Schedules of the learning rate and the weight decay.

A schedule is a function of the number of consumed samples. Samples of skipped steps do not count. If the run length is
given in iterations, it is converted to samples: each iteration counts as many samples as its global batch contains. A
batch-size ramp therefore changes the length of the schedule in iterations, but not in samples. The schedules use the
same formulas as Megatron-LM.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import LR_SCHEDULES

# Functions that define the decay of the learning rate. The argument is the progress of the decay, which is 0 at the end
# of the warm-up and 1 at the end of the decay. The learning rate is min_lr + f(progress) * (max_lr - min_lr).
DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
}
# Functions that define the final anneal of a warmup-stable-decay schedule, in the same form as `DECAY`. The argument is
# the progress of the anneal, from 0 to 1.
WSD_ANNEAL: dict[str, Callable[[float], float]] = DECAY | {
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}
WEIGHT_DECAY_RAMP: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0),
}


@dataclass(frozen=True)
class ScheduleLength:
    """Lengths, in samples, of the phases of a learning-rate schedule and of the whole run."""

    warmup: float
    decay: float
    anneal: float
    """Length of the final anneal of a warmup-stable-decay (WSD) schedule."""

    total: float
    """Length of the run. If the weight decay changes during the run, it reaches its final value at this point."""

    @classmethod
    def in_samples(cls, config: OptimizerConfig, samples: int) -> ScheduleLength:
        """Create the lengths from the flags that specify them in samples. `samples` is the length of the run in
        samples."""
        decay = samples if config.lr_decay_samples is None else config.lr_decay_samples
        return cls._of(config, config.lr_warmup_samples, decay, config.lr_wsd_decay_samples or 0, samples)

    @classmethod
    def in_iterations(
        cls, config: OptimizerConfig, iterations: int, samples_at: Callable[[int], int]
    ) -> ScheduleLength:
        """Create the lengths from the flags that specify them in iterations. `iterations` is the length of the run in
        iterations.

        `samples_at(n)` returns the number of samples that the first n iterations consume.
        """
        last = iterations if config.lr_decay_iters is None else config.lr_decay_iters
        decay = samples_at(last)
        anneal = decay - samples_at(last - (config.lr_wsd_decay_iters or 0))
        return cls._of(config, samples_at(config.lr_warmup_iters), decay, anneal, samples_at(iterations))

    @classmethod
    def _of(cls, config: OptimizerConfig, warmup: float, decay: int, anneal: float, total: int) -> ScheduleLength:
        if config.lr_warmup_fraction is not None:
            warmup = config.lr_warmup_fraction * float(decay)
        if config.lr_wsd_decay_fraction is not None:
            anneal = config.lr_wsd_decay_fraction * float(decay)
        return cls(warmup=float(warmup), decay=float(decay), anneal=float(anneal), total=float(total))


def constant(samples: float, length: ScheduleLength, config: OptimizerConfig) -> float:
    """Keep the peak learning rate until the end of the run."""
    assert config.lr is not None
    return config.lr


def linear(samples: float, length: ScheduleLength, config: OptimizerConfig) -> float:
    """Decay linearly from the peak learning rate to --min-lr."""
    return _decayed(samples, length, config, DECAY["linear"])


def cosine(samples: float, length: ScheduleLength, config: OptimizerConfig) -> float:
    """Decay from the peak learning rate to --min-lr along half a cosine period (arXiv 1608.03983)."""
    return _decayed(samples, length, config, DECAY["cosine"])


def inverse_square_root(samples: float, length: ScheduleLength, config: OptimizerConfig) -> float:
    """Decay the learning rate in proportion to 1 / sqrt(samples) (arXiv 1706.03762), but not below --min-lr."""
    assert config.lr is not None
    if samples > length.decay:
        return config.min_lr
    return max(config.min_lr, config.lr * max(length.warmup, 1.0) ** 0.5 / max(samples, 1) ** 0.5)


def wsd(samples: float, length: ScheduleLength, config: OptimizerConfig) -> float:
    """Warmup-stable-decay (arXiv 2404.06395). Keep the peak learning rate until the final anneal, and then decay to
    --min-lr."""
    into_anneal = samples - (length.decay - length.anneal)

    def left(ratio: float) -> float:
        return 1.0 if into_anneal <= 0 else WSD_ANNEAL[config.lr_wsd_decay_style](into_anneal / length.anneal)

    return _decayed(samples, length, config, left)


def _decayed(samples: float, length: ScheduleLength, config: OptimizerConfig, left: Callable[[float], float]) -> float:
    """Return the decayed learning rate, min_lr + left(progress) * (lr - min_lr). `progress` is 0 at the end of warm-up
    and 1 at the end of the decay."""
    assert config.lr is not None
    if samples > length.decay:
        return config.min_lr
    share = (samples - length.warmup) / (length.decay - length.warmup)
    return config.min_lr + left(share) * (config.lr - config.min_lr)


class OptimizerParamScheduler:
    """Stateless schedule of the learning rate and the weight decay. The learning rate and the weight decay depend only
    on the number of consumed samples.

    `config` must be validated. The constructor raises ValueError if the warm-up is not shorter than the decay. For a
    WSD schedule, the constructor also raises ValueError if the final anneal is missing or longer than the decay.
    """

    def __init__(self, config: OptimizerConfig, length: ScheduleLength) -> None:
        _check(config, length)
        self.config, self.length = config, length
        self._schedule = LR_SCHEDULES[config.lr_decay_style]
        self.start_wd = config.weight_decay if config.start_weight_decay is None else config.start_weight_decay
        self.end_wd = config.weight_decay if config.end_weight_decay is None else config.end_weight_decay

    def lr_at(self, samples: int) -> float:
        """Return the learning rate after `samples` consumed samples."""
        return self._lr_at(samples, self.config)

    def decoupled_lr_at(self, samples: int) -> float | None:
        """Return the learning rate of the parameter groups with a decoupled learning rate after `samples` consumed
        samples. Return None if the configuration has no decoupled learning rate."""
        return None if self.config.decoupled is None else self._lr_at(samples, self.config.decoupled)

    def _lr_at(self, samples: int, config: OptimizerConfig) -> float:
        length = self.length
        if length.warmup > 0 and samples <= length.warmup:
            assert config.lr is not None
            return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * samples / length.warmup
        where = f"--lr-decay-style {config.lr_decay_style} at {samples} consumed samples"
        try:
            lr = self._schedule(samples, length, config)
        except Exception as error:
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
        if not isinstance(lr, numbers.Real) or not 0 <= lr < math.inf:
            raise ValueError(f"{where}: gives {lr!r}; a schedule must return a finite number of at least 0")
        return float(lr)

    def weight_decay_at(self, samples: int) -> float:
        """Return the weight decay after `samples` consumed samples."""
        style = self.config.weight_decay_incr_style
        if style == "constant" or samples > self.length.total:
            return self.end_wd
        return self.start_wd + WEIGHT_DECAY_RAMP[style](samples / self.length.total) * (self.end_wd - self.start_wd)


def _check(config: OptimizerConfig, length: ScheduleLength) -> None:
    """Raise ValueError if the lengths do not fit together. This check cannot be a validation of the flags, because the
    length of the run may depend on the data."""
    if length.warmup >= length.decay:
        raise ValueError(
            f"learning-rate warm-up of {length.warmup:g} samples must be shorter than the decay length of "
            f"{length.decay:g}: lower --lr-warmup-iters, -samples or -fraction, or raise --lr-decay-iters or -samples"
        )
    if config.lr_decay_style == "WSD" and (not config.has_anneal or length.anneal > length.decay):
        raise ValueError(
            "--lr-decay-style WSD needs the length of a final anneal (--lr-wsd-decay-iters, -samples or -fraction), "
            f"of at most the decay length of {length.decay:g} samples, not {length.anneal:g}"
        )
