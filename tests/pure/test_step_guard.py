"""Tests of the dynamic loss scale and of the overflows that it causes."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.core.optimizer.grad_scaler import DynamicLossScaler, build_loss_scaler
from megatron.training.step_guard import is_nan


@pytest.mark.parametrize(
    ("loss", "overflow", "can_fall", "nan"),
    [
        (1.0, False, True, False),
        (1.0, True, True, False),
        (1.0, True, False, True),
        (math.nan, True, True, True),
    ],
)
def test_an_overflow_that_a_lower_loss_scale_corrects_is_not_a_nan(
    loss: float, overflow: bool, can_fall: bool, nan: bool
) -> None:
    values = torch.tensor([math.inf, overflow, overflow, 0.0, loss, 1.0], dtype=torch.float64)
    result = StepResult(2.0, can_fall)
    result.settle(values)
    assert is_nan(result) is nan
    assert result.skipped is overflow


def feed(scaler, overflows):
    scales = []
    for overflow in overflows:
        scaler.update(bool(overflow))
        scales.append(scaler.scale)
    return scales


def test_good_steps_do_not_restore_the_allowance_before_the_window_is_full():
    scaler = DynamicLossScaler(1024.0, 1.0, window=3, hysteresis=2)
    assert feed(scaler, [1, 0, 0, 1, 0, 0, 0, 1, 1]) == [1024, 1024, 1024, 512, 512, 512, 1024, 1024, 512]


def test_the_loss_scale_stays_above_its_minimum():
    assert feed(DynamicLossScaler(8.0, 4.0, window=9, hysteresis=1), [1, 1, 1]) == [4, 4, 4]


def test_the_state_survives_a_round_trip():
    scaler = DynamicLossScaler(1024.0, 1.0, window=3, hysteresis=2)
    feed(scaler, [1, 0, 0])
    other = DynamicLossScaler(2.0, 1.0, window=3, hysteresis=2)
    other.load_state_dict(scaler.state_dict())
    assert feed(other, [0, 1, 1, 1]) == feed(scaler, [0, 1, 1, 1]) == [2048, 2048, 1024, 512]


def test_the_flags_choose_the_loss_scaler():
    assert build_loss_scaler(OptimizerConfig(), fp16=False).scale == 1.0
    fixed = build_loss_scaler(OptimizerConfig(loss_scale=128.0), fp16=True)
    assert feed(fixed, [1, 1, 1]) == [128, 128, 128]
    assert build_loss_scaler(OptimizerConfig(), fp16=True).scale == 2.0**32
