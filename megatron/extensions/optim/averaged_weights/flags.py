"""Registers averaged weights, and defines their flags and the averages that these flags request. This module does not
import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, Stored, extension_flags

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

AVERAGES = "--ema-decay or --ema-half-life-tokens"
ROLL_BACK = "--optimizer-post-validation: averages would keep a step that is rolled back"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(AveragedWeightsFlags)
    if own.eval_weights == "ema" and not averages_of(config):
        rule = "needs averaged weights"
        yield Problem("--eval-weights", "ema", rule, "add --ema-decay or --ema-half-life-tokens")
    schedule = config.parallel.schedule
    if averages_of(config) and not PIPELINE_SCHEDULES.facts(schedule).flushes:
        given = "--ema-decay" if own.ema_decay else "--ema-half-life-tokens"
        rule = (
            f"needs the weights after each step, but --pipeline-schedule {schedule} updates them during the next step"
        )
        yield Problem(given, own.ema_decay or own.ema_half_life_tokens, rule, "use --pipeline-schedule 1f1b")


@extension_flags("moving averages of the weights", may_change=True, rules=rules)
@dataclass(frozen=True)
class AveragedWeightsFlags:
    ema_decay: tuple[float, ...] | None = flag(None, many=True, above=0, below=1, excludes=ROLL_BACK)
    """Keep an exponential moving average of the weights for each of these decays per step. The averages are sharded and
    saved like the optimizer's states, and start from the weights after the first step."""

    ema_half_life_tokens: tuple[int, ...] | None = flag(None, many=True, above=0, excludes=ROLL_BACK)
    """Keep an exponential moving average of the weights for each of these half-lives, which are given in tokens. A step
    with T tokens has the decay 2^(-T / half-life)."""

    ema_dtype: str | None = flag(None, choices=("fp32", "bf16"), no_effect_without=AVERAGES)
    """Number format of the averages. bf16 uses stochastic rounding, so that small changes are not lost. Default: the
    format of the main parameters, fp32."""

    ema_on_host: bool = flag(False, no_effect_without=AVERAGES)
    """Keep the averages in host memory. Each update of the averages copies the weights to the host. --ema-interval
    makes these copies less frequent."""

    ema_interval: int = flag(1, above=0, no_effect_without=AVERAGES)
    """Number of steps between updates of the averages. Each update applies the decay of all steps since the previous
    update."""

    eval_weights: str = flag("trained", choices=("trained", "ema"))
    """Weights used in evaluations: the trained weights, or the first average. If both --ema-decay and
    --ema-half-life-tokens are set, the first average belongs to --ema-decay. Before the average's first update,
    evaluations use the trained weights and log a message. With --skip-train, the run instead reports an error."""


@dataclass(frozen=True)
class Average:
    """Moving average of the weights, with either a decay per step or a half-life in tokens."""

    name: str
    """Name of the average's state. The name contains the decay, so that a run with a different decay starts a new
    average."""

    per_step: float | None
    half_life: int | None

    def decay(self, steps: int, tokens: int) -> float:
        """Return the factor by which the average is multiplied in an update that follows the previous update by `steps`
        steps with `tokens` tokens in total."""
        if self.per_step is not None:
            return self.per_step**steps
        assert self.half_life is not None
        return float(0.5 ** (tokens / self.half_life))


def averages_of(config: RunConfig) -> tuple[Average, ...]:
    """Return the averages that the flags of a run request."""
    flags = config.options(AveragedWeightsFlags)
    per_step = [Average(f"decay_{decay}".replace(".", "_"), decay, None) for decay in flags.ema_decay or ()]
    per_token = [Average(f"half_life_{tokens}", None, tokens) for tokens in flags.ema_half_life_tokens or ()]
    return tuple(dict.fromkeys((*per_step, *per_token)))


def stored(config: RunConfig) -> Stored:
    """Return the dtype of the stored averages, and whether they are stored on the host."""
    flags = config.options(AveragedWeightsFlags)
    return Stored(DTYPES[flags.ema_dtype] if flags.ema_dtype else None, flags.ema_on_host)


CALLBACKS.register(
    "ema",
    f"{__package__}.averages:MovingAverages",
    when=lambda config: bool(averages_of(config)),
    states=lambda config: tuple(average.name for average in averages_of(config)),
    stored=stored,
)
