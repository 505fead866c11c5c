"""The batch size over a run against a step-by-step walk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.config.arguments import parse_args
from megatron.training.config.batch_size import BatchSizes, iterations_of_run, num_microbatches, samples_of_run
from megatron.training.config.validation import resolve


def walk(sizes: BatchSizes, iterations: int) -> int:
    consumed = 0
    for _ in range(iterations):
        consumed += sizes.at(consumed)
    return consumed


def test_constant() -> None:
    sizes = BatchSizes(8)
    assert [sizes.at(consumed) for consumed in (0, 7, 8, 10**9)] == [8] * 4
    assert (sizes.iterations(79), sizes.iterations(80), sizes.samples(10)) == (9, 10, 80)


def test_ramp_of_megatron() -> None:
    """16 to 1024 by 8 over 300,000 samples: 126 intervals of about 2,380 samples."""
    sizes = BatchSizes(1024, 16, 8, 300_000)
    assert sizes.increments == 126
    assert (sizes.at(0), sizes.at(2380), sizes.at(2381)) == (16, 16, 24)
    assert (sizes.at(299_999), sizes.at(300_000)) == (1016, 1024)


RAMPS = st.builds(
    lambda start, increment, n, samples: BatchSizes(start + n * increment, start, increment, samples),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(0, 12),
    st.integers(1, 500),
)


@given(RAMPS, st.integers(0, 120))
def test_samples_and_iterations_follow_the_steps(sizes: BatchSizes, iterations: int) -> None:
    consumed = walk(sizes, iterations)
    assert sizes.samples(iterations) == consumed
    assert sizes.iterations(consumed) == iterations
    assert sizes.iterations(consumed + sizes.at(consumed) - 1) == iterations


@given(RAMPS, st.integers(0, 1000))
def test_sizes_never_shrink(sizes: BatchSizes, consumed: int) -> None:
    assert sizes.start <= sizes.at(consumed) <= sizes.at(consumed + 1) <= sizes.final


@pytest.mark.parametrize(
    ("length", "samples", "iterations"),
    [
        ("", None, None),
        ("--train-iters 5", None, 5),
        ("--train-samples 83", 83, 10),
        ("--train-tokens 1343", 83, 10),
    ],
)
def test_length_of_a_run(length: str, samples: int | None, iterations: int | None) -> None:
    argv = f"--global-batch-size 8 --seq-length 16 {length}"
    config = resolve(parse_args(argv.split()), 1)
    assert (samples_of_run(config), iterations_of_run(config)) == (samples, iterations)


def test_microbatches() -> None:
    assert num_microbatches(64, 2, 4) == 8
