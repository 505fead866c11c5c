"""Compare the batch sizes of a run with a step-by-step simulation."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.config.arguments import parse_args
from megatron.training.config.batch_size import BatchSizes, samples_of_run
from megatron.training.config.saved_flags import changed_lengths
from megatron.training.config.validation import resolve
from megatron.training.plan import History, RunPlan, plan_of


def walk(sizes: BatchSizes, iterations: int) -> int:
    consumed = 0
    for _ in range(iterations):
        consumed += sizes.at(consumed)
    return consumed


SCHEDULES = st.builds(
    lambda parts, final: BatchSizes(
        final, tuple(zip(accumulate(n for n, _ in parts), (b for _, b in parts), strict=True))
    ),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), max_size=5),
    st.integers(1, 9),
)


@given(SCHEDULES, st.integers(0, 120))
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
def test_the_length_of_a_run_follows_from_its_batches(length: str, samples: int | None, iterations: int | None) -> None:
    argv = f"--global-batch-size 8 --seq-length 16 {length}"
    config = resolve(parse_args(argv.split()), 1)
    plan, _ = RunPlan.planned(config)
    assert plan is not None and samples_of_run(config) == samples
    assert plan.phases[0].end is None if iterations is None else plan.iterations == iterations


@pytest.mark.parametrize(("given", "used"), [(100, 96), (96, 96), (9, 8), (7, 7)])
def test_a_batch_that_does_not_fit_the_ranks_is_rounded_down(given: int, used: int) -> None:
    """The batch size is rounded down to a multiple of 8, the product of micro-batch size 2 and DP 4. Validation refuses
    a batch size that is smaller than this product."""
    flags = f"--micro-batch-size 2 --global-batch-size {given} --decrease-batch-size-if-needed"
    assert resolve(parse_args(flags.split()), 4).training.global_batch_size == used


def test_schedules_in_tokens_use_the_unit_of_the_run() -> None:
    tokens = "--global-batch-size 4 --seq-length 16 --lr-decay-tokens 6400 --lr-warmup-tokens 640 --lr-decay-samples 7 "
    by_samples = resolve(parse_args(f"{tokens} --train-tokens 9600".split()), 1).optimizer
    assert (by_samples.lr_decay_samples, by_samples.lr_warmup_samples, by_samples.lr_decay_iters) == (400, 40, None)
    by_iterations = resolve(parse_args(f"{tokens} --train-iters 200".split()), 1).optimizer
    assert (by_iterations.lr_decay_iters, by_iterations.lr_warmup_iters) == (100, 10)
    assert (by_iterations.lr_decay_samples, by_iterations.lr_warmup_samples) == (None, 0)


GOOD = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3 --global-batch-size 8 "
    "--position-embedding-type rope"
)


def test_a_run_without_phases_has_one_phase() -> None:
    config = resolve(parse_args([*GOOD.split(), "--mock-data", "--train-iters", "20"]), 1)
    plan = plan_of(config)
    assert (plan.samples, plan.iterations, plan.tokens(40)) == (160, 20, 640)
    assert plan.longest is plan.trained(160) is plan.at(10**9) is plan.phases[0] and plan.phases[0].config is config
    assert plan.schedule().lr_at(80) == pytest.approx(5e-4)
    assert plan.record(8) == [{"name": "", "first_sample": 0, "planned": [160], "values": None}]


def test_a_longer_run_keeps_the_order_of_samples() -> None:
    config = resolve(parse_args([*GOOD.split(), "--mock-data", "--train-samples", "400"]), 1)
    history = History(96, plan_of(config).record(96))
    longer = plan_of(replace(config, training=replace(config.training, train_samples=900)))
    assert longer.continued(history).phases[0].lengths == (400, 900)
    begun = replace(history, phases=[*history.phases, {"name": "long", "first_sample": 80, "planned": [20]}])
    with pytest.raises(
        ValueError, match="--load: the checkpoint's run has begun phase long, which is missing; do not change"
    ):
        longer.continued(begun)


def test_flags_that_make_a_run_longer_are_named() -> None:
    before, now = (
        parse_args([*GOOD.split(), "--mock-data", *more.split()]) for more in ("--train-iters 9", "--train-iters 20")
    )
    assert changed_lengths(before, before) is None
    line = changed_lengths(before, now) or ""
    assert line.startswith("changed since the checkpoint: --train-iters 9 -> 20; samples") and "new end" in line
    fixed = replace(now, optimizer=replace(now.optimizer, lr_decay_iters=9))
    assert changed_lengths(before, fixed) == (
        "changed since the checkpoint: --lr-decay-iters not given -> 9, --train-iters 9 -> 20; samples continue in the "
        "original order"
    )
