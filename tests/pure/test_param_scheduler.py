"""Compare learning-rate schedules with closed-form formulas, both at the boundaries of their phases and within the
phases."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import LR_SCHEDULES
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler, ScheduleLength

BATCH = 8
PEAK, LOW = 3e-4, 3e-5


def scheduler(train_iters=100, train_samples=None, **flags):
    config = OptimizerConfig(lr=PEAK, min_lr=LOW, **flags)
    if train_samples is not None:
        return OptimizerParamScheduler(config, ScheduleLength.in_samples(config, train_samples))
    return OptimizerParamScheduler(config, ScheduleLength.in_iterations(config, train_iters, lambda n: n * BATCH))


def lr_of(s, iteration):
    return s.lr_at(iteration * BATCH)


def close(value):
    return pytest.approx(value, rel=1e-14)


def test_warm_up_is_linear_from_its_start_value():
    s = scheduler(lr_warmup_iters=10, lr_warmup_init=1e-5, lr_decay_style="cosine")
    assert lr_of(s, 0) == 1e-5
    assert lr_of(s, 5) == close((1e-5 + PEAK) / 2)
    assert lr_of(s, 10) == close(PEAK)
    assert lr_of(s, 11) < PEAK


def wsd(style: str, anneal: int = 20) -> dict[str, Any]:
    options = {"lr_wsd_decay_iters": anneal, "lr_wsd_decay_style": style, "lr_warmup_iters": 10}
    return {"lr_decay_style": "WSD"} | options


@pytest.mark.parametrize(
    ("flags", "shares"),
    [
        ({"lr_decay_style": "linear", "lr_warmup_iters": 20}, {60: 0.5, 40: 0.75, 100: 0, 101: 0}),
        (
            {"lr_decay_style": "cosine", "lr_warmup_iters": 20},
            {60: 0.5, 40: 0.5 * (1 + math.sqrt(0.5)), 100: 0, 101: 0},
        ),
        ({"lr_decay_style": "linear", "lr_decay_iters": 50}, {0: 1, 25: 0.5, 51: 0}),
        ({"lr_decay_style": "constant", "lr_warmup_iters": 4}, {2: 4 / 9, 4: 1, 99: 1, 1000: 1}),
        (wsd("linear"), {11: 1, 80: 1, 90: 0.5, 100: 0}),
        (wsd("cosine"), {11: 1, 80: 1, 90: 0.5, 100: 0}),
        (wsd("exponential"), {11: 1, 80: 1, 90: math.sqrt(2) - 1, 100: 0}),
        (wsd("minus_sqrt"), {11: 1, 80: 1, 90: 1 - math.sqrt(0.5), 100: 0}),
        (wsd("linear", anneal=0), {10: 1, 100: 1, 101: 0}),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_fraction": 0.2}, {80: 1, 90: 0.5}),
    ],
)
def test_the_remaining_share_of_the_decay_is_exact(flags, shares):
    s = scheduler(**flags)
    for iteration, share in shares.items():
        assert lr_of(s, iteration) == pytest.approx(LOW + share * (PEAK - LOW), rel=1e-12)


def test_the_inverse_square_root_schedule_counts_samples():
    s = scheduler(lr_decay_style="inverse-square-root", lr_warmup_iters=4)
    assert lr_of(s, 16) == close(PEAK / 2)
    assert lr_of(s, 100) == close(PEAK / 5)
    long = scheduler(train_iters=10_000, lr_decay_style="inverse-square-root", lr_warmup_iters=4)
    assert lr_of(long, 9_999) == LOW


def test_samples_and_iterations_give_the_same_schedule():
    a = scheduler(lr_warmup_iters=10, lr_decay_iters=80)
    b = scheduler(train_iters=None, train_samples=800, lr_warmup_samples=80, lr_decay_samples=640)
    c = scheduler(lr_warmup_fraction=0.125, lr_decay_iters=80)
    for samples in range(0, 900, 3):
        assert a.lr_at(samples) == b.lr_at(samples) == c.lr_at(samples)
        assert a.weight_decay_at(samples) == b.weight_decay_at(samples)


def test_weight_decay_ramps_up():
    ramp = {"start_weight_decay": 0.01, "end_weight_decay": 0.11}
    linear = scheduler(weight_decay_incr_style="linear", **ramp)
    cosine = scheduler(weight_decay_incr_style="cosine", **ramp)
    for s in (linear, cosine):
        assert s.weight_decay_at(0) == close(0.01)
        assert s.weight_decay_at(50 * BATCH) == close(0.06)
        assert s.weight_decay_at(100 * BATCH) == s.weight_decay_at(10**6) == close(0.11)
    assert linear.weight_decay_at(25 * BATCH) == close(0.035)
    assert cosine.weight_decay_at(25 * BATCH) == close(0.01 + 0.1 * 0.5 * (1 - math.sqrt(0.5)))
    assert scheduler(weight_decay=0.3).weight_decay_at(5) == 0.3


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lr_warmup_iters": 100}, "--lr-warmup-iters"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101}, "--lr-wsd-decay-iters"),
    ],
)
def test_invalid_schedule_flags_are_refused(flags, named):
    with pytest.raises(ValueError, match=named):
        scheduler(**flags)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda samples, length, config: None, "at 7 consumed samples: gives None; a schedule must return a finite"),
        (lambda samples, length, config: math.nan, "at 7 consumed samples: gives nan; a schedule must return a finite"),
        (lambda samples, length, config: -1e-3, "gives -0.001; a schedule must return a finite number of at least 0"),
        (lambda samples, length, config: 1 / 0, "at 7 consumed samples: ZeroDivisionError: division by zero"),
    ],
)
def test_a_failing_custom_schedule_is_named(schedule, message, monkeypatch):
    monkeypatch.setattr(LR_SCHEDULES, "_entries", dict(LR_SCHEDULES._entries))
    LR_SCHEDULES.register("own", schedule)
    with pytest.raises(ValueError, match=message) as error:
        scheduler(lr_decay_style="own").lr_at(7)
    assert str(error.value).startswith("--lr-decay-style own ")
