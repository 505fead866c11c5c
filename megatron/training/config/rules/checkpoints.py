"""Rules of checkpoints, skipped steps and garbage collection."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def checkpoints(c: RunConfig, world_size: int) -> Iterator[Problem]:
    metric, interval = c.checkpoint.save_retain_best, c.checkpoint.save_interval
    name = "--eval-interval" if metric == "valid_loss" else "--log-interval"
    measured = c.training.eval_interval if metric == "valid_loss" else c.logging.log_interval
    if metric and interval and measured > 0 and interval % measured:
        rule = f"{metric} is measured every {name} {measured}; --save-interval {interval} must be a multiple of it"
        yield Problem("--save-retain-best", metric, rule, f"use {name} {interval}")
    if metric == "valid_loss" and c.training.eval_iters == 0:
        yield Problem("--save-retain-best", metric, "needs evaluation, but --eval-iters is 0", "raise --eval-iters")


def skipping(c: RunConfig, world_size: int) -> Iterator[Problem]:
    k = c.checks
    checked = (k.check_for_nan_in_loss_and_grad, k.check_for_spiky_loss, k.check_for_large_grads)
    if k.max_skipped_iterations > 0 and not any(checked):
        rule = "has no effect while all checks are off"
        remedy = "remove --no-check-for-nan-in-loss-and-grad, or add --check-for-spiky-loss"
        yield Problem("--max-skipped-iterations", k.max_skipped_iterations, rule, remedy)
