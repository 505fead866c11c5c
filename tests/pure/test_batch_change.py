"""Tests of the length, the batch sizes and the learning rates of a run that resumes with a different batch size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.config.arguments import parse_args
from megatron.training.config.batch_size import BatchSizes
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve
from megatron.training.plan import RunPlan, plan_of
from tests.pure.test_batch_size import SCHEDULES, walk


@given(st.lists(st.tuples(SCHEDULES, st.integers(0, 40)), min_size=1, max_size=4), SCHEDULES, st.integers(0, 40))
def test_resumed_sizes_continue_from_the_position(
    parts: list[tuple[BatchSizes, int]], last: BatchSizes, more: int
) -> None:
    """The run is interrupted several times and resumes with different batch sizes. Each part of the run records its
    batch size changes for the next part."""
    iterations, consumed, past = 0, 0, ()
    positions = []
    for sizes, steps in [*parts, (last, more)]:
        resumed = sizes.resumed(past)
        for _ in range(steps):
            positions.append((iterations, consumed))
            iterations, consumed = iterations + 1, consumed + resumed.at(consumed)
        past = resumed.points(iterations, consumed)
    positions.append((iterations, consumed))
    assert [(resumed.iterations(samples), resumed.samples(number)) for number, samples in positions] == positions
    assert all(resumed.at(s) == t - s for (_, s), (_, t) in pairwise(positions))
    assert resumed.samples(iterations + 3) == consumed + walk_on(resumed, consumed, 3)


def walk_on(sizes: BatchSizes, consumed: int, steps: int) -> int:
    return walk(replace(sizes, past=((0, 0),), earlier=tuple((end - consumed, b) for end, b in sizes.earlier)), steps)


MODEL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3 --min-lr 1e-5 --mock-data"
STYLES = (
    "--lr-decay-style linear",
    "--lr-decay-style cosine --lr-warmup-{unit} {n5}",
    "--lr-decay-style inverse-square-root --lr-warmup-{unit} {n5}",
    "--lr-decay-style WSD --lr-wsd-decay-{unit} {n10}",
    "--lr-decay-style constant --start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style linear",
    "--lr-decay-style cosine --lr-decay-{unit} {n30}",
    "--lr-decay-style linear --lr-warmup-fraction 0.1",
)


def config_of(style: str, unit: str, size: int, more: str = "") -> RunConfig:
    n5, n10, n30, whole = (n if unit == "iters" else 8 * n for n in (5, 10, 30, 40))
    flags = f"{MODEL} --train-{unit} {whole} --global-batch-size {size} {more} "
    return resolve(parse_args((flags + style.format(unit=unit, n5=n5, n10=n10, n30=n30)).split()), 1)


def resumed(before: RunPlan, iteration: int, config: RunConfig) -> tuple[RunPlan, int]:
    """Return the plan of a run that resumes with `config` after `iteration` iterations, and the run's position in the
    schedule."""
    consumed = before.sizes.samples(iteration)
    past = before.sizes.points(iteration, consumed)
    plan = plan_of(resolve(replace(config, past_batches=past), 1))
    scheduled = before.schedule_sizes.samples(iteration)
    return plan, plan.schedule_position(scheduled, before.base)


def curve(plan: RunPlan, iteration: int, position: int) -> list[tuple[int, float, float]]:
    """Return one tuple (consumed samples, learning rate, weight decay) for each step from `position` to the end of the
    run."""
    schedule, consumed, found = plan.schedule(), plan.sizes.samples(iteration), []
    for _ in range(iteration, plan.iterations):
        found.append((consumed, schedule.lr_at(position), schedule.weight_decay_at(position)))
        size = plan.sizes.at(consumed)
        consumed, position = consumed + size, position + size
    assert consumed <= plan.samples < consumed + plan.sizes.at(consumed)
    return found


@pytest.mark.parametrize("size", [4, 16, 32])
@pytest.mark.parametrize("style", STYLES)
def test_a_run_in_iterations_keeps_its_schedule_by_iteration(style: str, size: int) -> None:
    whole = plan_of(config_of(style, "iters", 8))
    plan, position = resumed(whole, 16, config_of(style, "iters", size))
    assert (plan.iterations, plan.samples) == (40, 16 * 8 + 24 * size)
    found, expected = curve(plan, 16, position), curve(whole, 16, 16 * 8)
    assert [each[1:] for each in found] == [pytest.approx(each[1:], rel=1e-12) for each in expected]
    again, position = resumed(plan, 24, config_of(style, "iters", 8))
    assert again.samples == 16 * 8 + 8 * size + 16 * 8
    assert [e[1:] for e in curve(again, 24, position)] == [pytest.approx(e[1:], rel=1e-12) for e in expected[8:]]


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("style", STYLES)
def test_a_run_in_samples_keeps_its_schedule_by_sample(style: str, size: int) -> None:
    whole = plan_of(config_of(style, "samples", 8))
    plan, position = resumed(whole, 16, config_of(style, "samples", size))
    assert position == 16 * 8 and (plan.iterations, plan.samples) == (16 + 24 * 8 // size, 320)
    expected = {consumed: rest for consumed, *rest in curve(whole, 16, 16 * 8)}
    found = {consumed: rest for consumed, *rest in curve(plan, 16, position)}
    shared = expected.keys() & found.keys()
    assert len(shared) >= 12 and all(expected[at] == found[at] for at in shared)


@pytest.mark.parametrize("ramp", ["--rampup-batch-size 4 4 60", "--step-batch-size-schedule 0:4,960:8"])
@pytest.mark.parametrize("style", STYLES[:4])
def test_a_resumed_run_may_drop_its_ramp(ramp: str, style: str) -> None:
    """A run can drop its batch-size ramp in the middle of the ramp or after the end of the ramp. In both cases, the run
    ends after the same number of iterations, at the end of its schedule."""
    size = 8 if "rampup" in ramp else 0
    text = config_of(style, "iters", 8, ramp) if size else _with_schedule(style, ramp)
    whole = plan_of(text)
    for iteration in (7, 20):
        plan, position = resumed(whole, iteration, config_of(style, "iters", 16))
        assert (plan.iterations, plan.samples) == (40, whole.sizes.samples(iteration) + (40 - iteration) * 16)
        assert position == iteration * 16 and plan.sizes.at(whole.sizes.samples(iteration)) == 16
        straight = plan_of(config_of(style, "iters", 16))
        assert [e[1] for e in curve(plan, iteration, position)] == [
            e[1] for e in curve(straight, iteration, iteration * 16)
        ]


def _with_schedule(style: str, ramp: str) -> RunConfig:
    flags = f"{MODEL} --train-iters 40 {ramp} " + style.format(unit="iters", n5=5, n10=10, n30=30)
    return resolve(parse_args(flags.split()), 1)


def test_changing_the_unit_keeps_the_position_in_the_schedule() -> None:
    """The run changes its batch size from 8 to 4 after 16 of 40 iterations. The length of the run is then given in
    samples instead of iterations, and later in iterations again."""
    first = plan_of(config_of(STYLES[0], "iters", 8))
    second, position = resumed(first, 16, config_of(STYLES[0], "iters", 4))
    assert position == 16 * 4
    third, position = resumed(second, 20, config_of(STYLES[0], "samples", 4))
    assert position == third.sizes.samples(20) == 16 * 8 + 4 * 4
    assert resumed(third, 20, config_of(STYLES[0], "iters", 4))[1] == 20 * 4


def test_the_remaining_length_of_a_run_is_printed() -> None:
    before = config_of(STYLES[0], "iters", 8)
    here = ((0, 0), (16, 128))
    assert plan_of(before).changed_batch(before, here) is None
    plan, _ = resumed(plan_of(before), 16, config_of(STYLES[0], "iters", 4))
    assert plan.changed_batch(before, here) == (
        "another batch size from here on: 24 iterations and 96 samples remain until iteration 40; the learning rate "
        "depends on the iteration, as before"
    )
    plan, _ = resumed(plan_of(before), 16, config_of(STYLES[0], "samples", 4))
    assert str(plan.changed_batch(before, here)).endswith(
        "48 iterations and 192 samples remain until iteration 64; the learning rate now depends on the samples; "
        "before, it depended on the iteration"
    )
    by_samples = config_of(STYLES[0], "samples", 8)
    for unit, said in (
        ("samples", "depends on the samples, as before"),
        ("iters", "now depends on the iteration; before, it depended on the samples"),
    ):
        plan, _ = resumed(plan_of(by_samples), 16, config_of(STYLES[0], unit, 4))
        assert str(plan.changed_batch(by_samples, here)).endswith(f"the learning rate {said}")
