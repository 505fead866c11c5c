"""Rules of checkpoints, skipped steps, profiles, statistics of layers and garbage collection."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.training.config.flags import dashed, field_table
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


def layer_statistics(c: RunConfig, world_size: int) -> Iterator[Problem]:
    flag = field_table()["layer_growth_threshold"]
    threshold = c.logging.layer_growth_threshold
    if threshold != flag.default and not c.logging.log_layer_stats:
        yield Problem.no_effect(flag.name, threshold, "--log-layer-stats")
    if threshold and not 1 < threshold < math.inf:
        yield Problem(flag.name, threshold, "must be 0 or above 1", f"the default is {flag.default}")


def traces(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o = c.logging
    for field in ("trace_step_start", "trace_step_end"):
        if not o.trace and getattr(o, field) != field_table()[field].default:
            yield Problem.no_effect(dashed(field), getattr(o, field), "--trace")
    if o.trace and o.trace_step_end <= o.trace_step_start:
        rule = f"must be above --trace-step-start {o.trace_step_start}"
        yield Problem("--trace-step-end", o.trace_step_end, rule, f"nearest: {o.trace_step_start + 1}")
    length = c.training.train_iters
    if o.trace and length is not None and 0 < length <= o.trace_step_start:
        rule = f"has no effect in a run of --train-iters {length}"
        remedy = f"use {max(0, length - 2)} and --trace-step-end {length}"
        yield Problem("--trace-step-start", o.trace_step_start, rule, remedy, harmless=True)


def profiles(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o = c.logging
    by_torch = o.profile and (o.use_pytorch_profiler or c.parallel.cpu)
    for field, needed, present in (
        ("use_pytorch_profiler", "--profile", o.profile),
        ("pytorch_profiler_collect_shapes", "--profile --use-pytorch-profiler", by_torch),
        ("pytorch_profiler_collect_callstack", "--profile --use-pytorch-profiler", by_torch),
        ("record_shapes", "--profile on GPUs", o.profile and not by_torch),
        ("record_memory_history", "GPUs", not c.parallel.cpu),
    ):
        if getattr(o, field) and not present:
            yield Problem.no_effect(dashed(field), None, needed)
    if not (o.profile or o.record_memory_history):
        return
    if o.profile_step_end <= o.profile_step_start:
        rule = f"must be above --profile-step-start {o.profile_step_start}"
        yield Problem("--profile-step-end", o.profile_step_end, rule, f"nearest: {o.profile_step_start + 1}")
    absent = [rank for rank in o.profile_ranks if not 0 <= rank < world_size]
    if absent:
        yield Problem("--profile-ranks", o.profile_ranks, f"must be below the {world_size} ranks", "remove the others")
