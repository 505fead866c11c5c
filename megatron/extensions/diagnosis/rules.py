"""Rules of layer statistics, stragglers, profiles and traces. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.extensions.diagnosis.flags import DiagnosisConfig
from megatron.training.config.flags import dashed, field_table, named_value
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def rules(c: RunConfig, world_size: int) -> Iterator[Problem]:
    yield from layer_statistics(c)
    yield from profiles(c, world_size)
    yield from traces(c)
    yield from recordings(c)


def layer_statistics(c: RunConfig) -> Iterator[Problem]:
    o, flag = c.options(DiagnosisConfig), field_table()["layer_growth_threshold"]
    threshold = o.layer_growth_threshold
    if threshold != flag.default and not o.log_layer_stats:
        yield Problem.no_effect(flag.name, threshold, "--log-layer-stats")
    if threshold and not 1 < threshold < math.inf:
        yield Problem(flag.name, threshold, "must be 0 or above 1", f"the default is {flag.default}")


def traces(c: RunConfig) -> Iterator[Problem]:
    o = c.options(DiagnosisConfig)
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
    o = c.options(DiagnosisConfig)
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


def recordings(c: RunConfig) -> Iterator[Problem]:
    """What a recording of CUDA graphs cannot contain."""
    o, impl = c.options(DiagnosisConfig), named_value(c, "cuda_graph_impl")
    for flag, value, given, why in (
        ("--log-layer-stats", o.log_layer_stats, o.log_layer_stats, "hooks do not run in a recording"),
        ("--trace", None, o.trace, "actions and collectives do not run one by one in a recording"),
        ("--log-straggler", None, o.log_straggler, "forward and backward pass cannot be timed separately"),
    ):
        if given and impl not in (None, "none"):
            yield Problem.exclusive(flag, value, f"--cuda-graph-impl {impl}", why)
