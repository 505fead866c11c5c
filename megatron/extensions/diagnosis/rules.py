"""Rules of layer statistics, stragglers, profiles and traces. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.extensions.diagnosis.flags import DiagnosisConfig
from megatron.training.config.flags import field_table
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def rules(c: RunConfig, world_size: int) -> Iterator[Problem]:
    yield from layer_statistics(c)
    yield from profiles(c, world_size)
    yield from traces(c)


def layer_statistics(c: RunConfig) -> Iterator[Problem]:
    o, flag = c.options(DiagnosisConfig), field_table()["layer_growth_threshold"]
    threshold = o.layer_growth_threshold
    if threshold and not 1 < threshold < math.inf:
        yield Problem(flag.name, threshold, "must be 0 or above 1", f"the default is {flag.default}")


def traces(c: RunConfig) -> Iterator[Problem]:
    o = c.options(DiagnosisConfig)
    if o.trace and o.trace_step_end <= o.trace_step_start:
        rule = f"must be above --trace-step-start {o.trace_step_start}"
        yield Problem("--trace-step-end", o.trace_step_end, rule, f"nearest: {o.trace_step_start + 1}")
    length = c.training.train_iters
    if o.trace and length is not None and 0 < length <= o.trace_step_start:
        rule = f"has no effect in a run of --train-iters {length}"
        remedy = f"use {max(0, length - 2)} and --trace-step-end {length}"
        yield Problem("--trace-step-start", o.trace_step_start, rule, remedy, harmless=True)


def profiles(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o = c.options(DiagnosisConfig)
    if not (o.profile or o.record_memory_history):
        return
    if o.profile_step_end <= o.profile_step_start:
        rule = f"must be above --profile-step-start {o.profile_step_start}"
        yield Problem("--profile-step-end", o.profile_step_end, rule, f"nearest: {o.profile_step_start + 1}")
    absent = [rank for rank in o.profile_ranks if not 0 <= rank < world_size]
    if absent:
        yield Problem("--profile-ranks", o.profile_ranks, f"must be below the {world_size} ranks", "remove the others")
