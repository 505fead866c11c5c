"""Flags of what checkpoints are kept, and the rule about them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.parts import CHECKPOINT_CLEANUPS
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags


@extension_flags("retention of checkpoints", may_change=True)
@dataclass(frozen=True)
class RetentionFlags:
    keep_last: int | None = flag(None, above=0, no_effect_without="--save")
    """Keep this many newest checkpoints and delete the others; 1 if only other retention flags are given."""

    keep_every: int | None = flag(None, "--save-retain-interval", above=0, no_effect_without="--save")
    """Keep checkpoints whose iteration is a multiple of this, in addition to the newest."""

    save_retain_best: str | None = flag(None, choices=("valid_loss", "lm_loss"), no_effect_without="--save")
    """Keep the checkpoint with the lowest value of this metric at its iteration, in addition to the newest."""

    def validate(self, config: RunConfig, world_size: int) -> Iterator[Problem]:
        metric, interval, training = self.save_retain_best, config.checkpoint.save_interval, config.training
        name = "--eval-interval" if metric == "valid_loss" else "--log-interval"
        measured = training.eval_interval if metric == "valid_loss" else config.logging.log_interval
        if metric and interval and measured > 0 and interval % measured:
            rule = f"{metric} is measured every {name} {measured}; --save-interval {interval} must be a multiple of it"
            yield Problem("--save-retain-best", metric, rule, f"use {name} {interval}")
        if metric == "valid_loss" and training.eval_iters == 0:
            yield Problem("--save-retain-best", metric, "needs evaluation, but --eval-iters is 0", "raise --eval-iters")


CHECKPOINT_CLEANUPS.register(
    "retention",
    f"{__package__}.retention:cleanup",
    when=lambda config: config.options(RetentionFlags) != RetentionFlags(),
)
