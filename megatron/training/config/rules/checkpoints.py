"""Rules of checkpoints, skipped steps and garbage collection."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.flags import dashed
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def checkpoints(c: RunConfig, world_size: int) -> Iterator[Problem]:
    if c.checkpoint.load is None:
        for field in ("finetune", "reset_iteration", "exit_on_missing_checkpoint", "override_data_fingerprint"):
            if getattr(c.checkpoint, field):
                yield Problem.no_effect(dashed(field), None, "--load")
    if c.checkpoint.save is None:
        for field in ("keep_last", "keep_every", "save_retain_best", "fatal_save_errors"):
            if value := getattr(c.checkpoint, field):
                yield Problem.no_effect(dashed(field), None if value is True else value, "--save")
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


def garbage(c: RunConfig, world_size: int) -> Iterator[Problem]:
    t = c.training
    if t.manual_gc:
        return
    for name, value, given in (
        ("--manual-gc-interval", t.manual_gc_interval, t.manual_gc_interval != 0),
        ("--no-manual-gc-eval", None, not t.manual_gc_eval),
    ):
        if given:
            yield Problem.no_effect(name, value, "--manual-gc")
