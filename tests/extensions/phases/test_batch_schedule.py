"""Tests of batch sizes that change during a run. `tests/pure/test_batch_size.py` compares batch sizes with a
step-by-step simulation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.optimizer.param_scheduler import ScheduleLength
from megatron.extensions.data.phases.batch_steps import parse_batch_schedule, ramp
from megatron.training.config.arguments import parse_args
from megatron.training.config.batch_size import BatchSizes
from megatron.training.config.validation import resolve, validate
from megatron.training.plan import RunPlan
from tests.pure.test_batch_size import walk


def test_ramp_matches_megatron() -> None:
    """A ramp of the batch size from 16 to 1024 in increments of 8 over 300,000 samples has 126 intervals of about 2,380
    samples."""
    sizes = ramp(1024, 16, 8, 300_000)
    assert len(sizes.earlier) == 126
    assert (sizes.at(0), sizes.at(2380), sizes.at(2381)) == (16, 16, 24)
    assert (sizes.at(299_999), sizes.at(300_000)) == (1016, 1024)


RAMPS = st.builds(
    lambda start, increment, n, samples: ramp(start + n * increment, start, increment, samples),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(0, 12),
    st.integers(1, 500),
)


@given(RAMPS, st.integers(0, 120))
def test_samples_and_iterations_follow_the_steps(sizes: BatchSizes, iterations: int) -> None:
    consumed = walk(sizes, iterations)
    assert (sizes.samples(iterations), sizes.iterations(consumed)) == (consumed, iterations)


def schedule(text: str) -> BatchSizes:
    argv = ["--step-batch-size-schedule", text, "--seq-length", "16", "--train-samples", "9999"]
    return BatchSizes.from_config(resolve(parse_args(argv), 1))


def test_a_schedule_by_tokens() -> None:
    sizes = schedule("0:4 1.6K:8, 3.2K:16")
    assert sizes == BatchSizes(16, ((100, 4), (200, 8)))
    assert [sizes.at(consumed) for consumed in (0, 99, 100, 199, 200, 10**6)] == [4, 4, 8, 8, 16, 16]
    assert schedule("0:4") == BatchSizes(4)


@pytest.mark.parametrize("flags", ["--step-batch-size-schedule 0:4,80:8", "--rampup-batch-size 4 4 5"])
def test_lengths_in_iterations_become_samples_if_the_batch_size_varies(flags: str) -> None:
    """The first two batches have 4 samples each, and later batches have 8."""
    flags += " --seq-length 16 --train-iters 9 --lr-warmup-iters 1 --lr-decay-iters 5 --lr-wsd-decay-iters 3"
    flags += " --global-batch-size 8" if "rampup" in flags else ""
    config = resolve(parse_args(flags.split()), 1)
    plan, _ = RunPlan.planned(config)
    assert plan is not None and (plan.samples, plan.iterations) == (64, 9)
    assert plan.schedule().length == ScheduleLength(warmup=4, decay=32, anneal=24, total=64)


UNREADABLE = {"": "must begin", "5:4": "must begin", "0:4 10:x": "'10:x' must be", "0:4 9:8 9:16": "must increase"}
UNREADABLE["0.5:4"] = "must be TOKENS"


@pytest.mark.parametrize(("text", "message"), UNREADABLE.items())
def test_an_unreadable_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_batch_schedule(text)


@pytest.mark.parametrize("text", ["--step-batch-size-schedule a", "--rampup-batch-size 0", "--rampup-batch-size 1 0 3"])
def test_unreadable_sizes_with_a_length_in_tokens_are_one_error(text: str) -> None:
    """If the batch sizes are invalid, the run's length is not computed. Validation reports the invalid flag as the only
    error."""
    flag = text.split()[0]
    config = parse_args(f"--seq-length 16 {text} --train-tokens 4096".split())
    assert any(problem.flag == flag for problem in validate(config, 1))
