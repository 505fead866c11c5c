"""Batch sizes that change with consumed samples or tokens (--rampup-batch-size, --step-batch-size-schedule).

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from megatron.extensions.data.phases.batch_steps import parse_batch_schedule
from megatron.extensions.data.phases.flags import BatchScheduleFlags
from megatron.training.config.problem import Problem, multiples
from megatron.training.config.rules.training import samples_of_micro_batches
from megatron.training.config.run_config import RunConfig


def with_last_size(config: RunConfig) -> RunConfig:
    """Return the configuration with --global-batch-size set to the last batch size of --step-batch-size-schedule,
    unless --global-batch-size is given."""
    text, training = config.options(BatchScheduleFlags).step_batch_size_schedule, config.training
    # An invalid schedule is ignored here, because a flag rule reports it.
    with suppress(ValueError):
        if text is not None and training.global_batch_size is None:
            training = replace(training, global_batch_size=parse_batch_schedule(text)[-1][1])
    return replace(config, training=training)


def rules(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check --rampup-batch-size and --step-batch-size-schedule."""
    options, (step, name) = c.options(BatchScheduleFlags), samples_of_micro_batches(c, world_size)
    ramped, text = options.rampup_batch_size, options.step_batch_size_schedule
    if step and ramped is not None:
        yield from _ramp(c, ramped, step, f"{name} {step}")
    if step and text is not None:
        yield from _by_tokens(c, text, step, f"{name} {step}")
    if ramped is not None and text is not None:
        yield Problem.exclusive("--step-batch-size-schedule", text, "--rampup-batch-size")


def _by_tokens(c: RunConfig, text: str, step: int, shown: str) -> Iterator[Problem]:
    t, name = c.training, "--step-batch-size-schedule"
    try:
        steps = [size for _, size in parse_batch_schedule(text)]
    except ValueError as error:
        yield Problem(name, text, str(error), 'use for example "0:384 200B:768 400B:1152"')
        return
    for size in steps:
        if not size or size % step:
            yield Problem(name, text, f"batch size {size} must be a multiple of {shown}", multiples(size, step))
    if t.global_batch_size != steps[-1]:
        rule = f"must end with --global-batch-size {t.global_batch_size}"
        yield Problem(name, text, rule, "remove --global-batch-size, which the schedule determines")


def _ramp(c: RunConfig, values: tuple[int, ...], step: int, shown: str) -> Iterator[Problem]:
    name, final = "--rampup-batch-size", c.training.global_batch_size or 0
    if len(values) != 3:
        yield Problem(name, values, "must be three numbers", "use START INCREMENT SAMPLES")
        return
    start, increment, _ = values
    if min(values) < 1 or final < 1:
        return
    if start % step:
        yield Problem(name, values, f"START {start} must be a multiple of {shown}", multiples(start, step))
    if increment % step:
        yield Problem(name, values, f"INCREMENT {increment} must be a multiple of {shown}", multiples(increment, step))
    if start > final:
        rule = f"START {start} must be at most --global-batch-size {final}"
        yield Problem(name, values, rule, f"nearest: {final}")
    elif (final - start) % increment:
        rule = f"--global-batch-size {final} - START {start} must be a multiple of INCREMENT {increment}"
        near = start + (final - start) // increment * increment
        yield Problem(name, values, rule, f"nearest: --global-batch-size {near} or {near + increment}")
