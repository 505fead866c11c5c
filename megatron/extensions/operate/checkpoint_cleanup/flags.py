"""Checkpoint retention flags, and their rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(RetentionFlags)
    metric = own.save_retain_best
    interval = config.checkpoint.save_interval
    training = config.training
    validates = metric != "lm_loss"
    if metric and metric not in (known := _metrics(config)):
        yield Problem("--save-retain-best", metric, "is not a metric of this run", f"use {' or '.join(known)}")
        return
    name = "--eval-interval" if validates else "--log-interval"
    measured = training.eval_interval if validates else config.logging.log_interval
    if metric and interval and measured > 0 and interval % measured:
        rule = f"{metric} is measured every {measured} steps, and --save-interval {interval} is not a multiple"
        yield Problem("--save-retain-best", metric, rule, f"use {name} {interval}")
    if metric and validates and training.eval_iters == 0:
        yield Problem("--save-retain-best", metric, "needs evaluation, but --eval-iters is 0", "raise --eval-iters")


@extension_flags("retention of checkpoints", may_change=True, rules=rules)
@dataclass(frozen=True)
class RetentionFlags:
    keep_last: int | None = flag(None, above=0, no_effect_without="--save")
    """Number of newest checkpoints to keep. Older checkpoints are deleted. Default: 1 if another retention flag is
    set."""

    keep_every: int | None = flag(None, "--save-retain-interval", above=0, no_effect_without="--save")
    """Keep checkpoints whose iteration is a multiple of this number, in addition to the newest checkpoints."""

    save_retain_best: str | None = flag(None, no_effect_without="--save")
    """Keep the checkpoint with the lowest value of this metric, in addition to the newest checkpoints. The metric is
    valid_loss, lm_loss, or valid_NAME_loss of a named validation set. The link SAVE/best points to the checkpoint."""


def _metrics(config: RunConfig) -> list[str]:
    """Return the metrics that --save-retain-best can use in a run."""
    try:
        names = list(config.data.named_sets)
    except ValueError:  # another rule reports the invalid validation set
        names = []
    return ["valid_loss", "lm_loss", *(f"valid_{name}_loss" for name in names)]


CALLBACKS.register(
    "retention",
    f"{__package__}.retention:Retention",
    when=lambda config: config.options(RetentionFlags) != RetentionFlags(),
)
