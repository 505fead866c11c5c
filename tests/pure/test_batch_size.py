"""The batch size over a run against a step-by-step walk."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.config.arguments import parse_args
from megatron.training.config.batch_size import (
    BatchSizes,
    parse_batch_schedule,
    samples_of_run,
)
from megatron.training.config.validation import resolve
from megatron.training.plan import RunPlan


def walk(sizes: BatchSizes, iterations: int) -> int:
    consumed = 0
    for _ in range(iterations):
        consumed += sizes.at(consumed)
    return consumed


def test_ramp_of_megatron() -> None:
    """16 to 1024 by 8 over 300,000 samples: 126 intervals of about 2,380 samples."""
    sizes = BatchSizes.ramp(1024, 16, 8, 300_000)
    assert len(sizes.earlier) == 126
    assert (sizes.at(0), sizes.at(2380), sizes.at(2381)) == (16, 16, 24)
    assert (sizes.at(299_999), sizes.at(300_000)) == (1016, 1024)


RAMPS = st.builds(
    lambda start, increment, n, samples: BatchSizes.ramp(start + n * increment, start, increment, samples),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(0, 12),
    st.integers(1, 500),
)


SCHEDULES = st.builds(
    lambda parts, final: BatchSizes(
        final, tuple(zip(accumulate(n for n, _ in parts), (b for _, b in parts), strict=True))
    ),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), max_size=5),
    st.integers(1, 9),
)


@given(RAMPS | SCHEDULES, st.integers(0, 120))
def test_samples_and_iterations_follow_the_steps(sizes: BatchSizes, iterations: int) -> None:
    consumed = walk(sizes, iterations)
    assert sizes.samples(iterations) == consumed
    assert sizes.iterations(consumed) == iterations
    assert sizes.iterations(consumed + sizes.at(consumed) - 1) == iterations


@pytest.mark.parametrize(
    ("length", "samples", "iterations"),
    [
        ("", None, None),
        ("--train-iters 5", None, 5),
        ("--train-samples 83", 83, 10),
        ("--train-tokens 1343", 83, 10),
        ("--train-tokens 1343 --train-samples 70", 70, 8),
        ("--train-tokens 1343 --train-samples 700", 83, 10),
        ("--train-tokens 1343 --train-iters 5", 40, 5),
        ("--train-tokens 1343 --train-iters 50", 83, 10),
    ],
)
def test_length_of_a_run(length: str, samples: int | None, iterations: int | None) -> None:
    argv = f"--global-batch-size 8 --seq-length 16 {length}"
    config = resolve(parse_args(argv.split()), 1)
    plan, _ = RunPlan.planned(config)
    assert plan is not None and samples_of_run(config) == samples
    assert plan.phases[0].end is None if iterations is None else plan.iterations == iterations


@pytest.mark.parametrize(("given", "used"), [(100, 96), (96, 96), (9, 8), (7, 7)])
def test_a_batch_that_does_not_fit_the_ranks_is_rounded_down(given: int, used: int) -> None:
    """To a multiple of micro-batch size 2 * DP 4; one that is less stays, and is refused."""
    flags = f"--micro-batch-size 2 --global-batch-size {given} --decrease-batch-size-if-needed"
    assert resolve(parse_args(flags.split()), 4).training.global_batch_size == used


def schedule(text: str) -> BatchSizes:
    argv = ["--step-batch-size-schedule", text, "--seq-length", "16", "--train-samples", "9999"]
    return BatchSizes.from_config(resolve(parse_args(argv), 1))


def test_a_schedule_by_tokens() -> None:
    sizes = schedule("0:4 1.6K:8, 3.2K:16")
    assert sizes == BatchSizes(16, ((100, 4), (200, 8)))
    assert [sizes.at(consumed) for consumed in (0, 99, 100, 199, 200, 10**6)] == [4, 4, 8, 8, 16, 16]
    assert schedule("0:4") == BatchSizes(4)


@pytest.mark.parametrize(
    "flags", ["--step-batch-size-schedule 0:4,80:8", "--global-batch-size 8 --rampup-batch-size 4 4 5"]
)
def test_lengths_in_iterations_become_samples_where_the_batch_varies(flags: str) -> None:
    """4 and 4 samples, then 8 at a time."""
    flags += " --seq-length 16 --train-iters 9 --lr-warmup-iters 1 --lr-decay-iters 5 --lr-wsd-decay-iters 3"
    config = resolve(parse_args(flags.split()), 1)
    plan, _ = RunPlan.planned(config)
    assert plan is not None and (config.training.train_samples, plan.iterations) == (64, 9)
    o = config.optimizer
    assert (o.lr_warmup_samples, o.lr_decay_samples, o.lr_wsd_decay_samples) == (4, 32, 16)
    assert (o.lr_warmup_iters, o.lr_decay_iters, o.lr_wsd_decay_iters) == (0, None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin"),
        ("5:4", "must begin"),
        ("0:4 10:x", "'10:x' must be"),
        ("0:4 9:8 9:16", "must rise"),
        ("0.5:4", "must be TOKENS"),
    ],
)
def test_a_schedule_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_batch_schedule(text)


def test_schedules_in_tokens_take_the_unit_of_the_run() -> None:
    tokens = "--global-batch-size 4 --seq-length 16 --lr-decay-tokens 6400 --lr-warmup-tokens 640 --lr-decay-samples 7 "
    by_samples = resolve(parse_args(f"{tokens} --train-tokens 9600".split()), 1).optimizer
    assert (by_samples.lr_decay_samples, by_samples.lr_warmup_samples, by_samples.lr_decay_iters) == (400, 40, None)
    by_iterations = resolve(parse_args(f"{tokens} --train-iters 200".split()), 1).optimizer
    assert (by_iterations.lr_decay_iters, by_iterations.lr_warmup_iters) == (100, 10)
    assert (by_iterations.lr_decay_samples, by_iterations.lr_warmup_samples) == (None, 0)
