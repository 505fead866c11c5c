"""Which steps are spikes, and which overflows are those of fp16's loss scale."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.training.config.run_config import ChecksConfig
from megatron.training.step_guard import WARM_UP, WINDOW, StepJudge, is_nan

CPU = torch.device("cpu")


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def feed(judge: StepJudge, loss: float, norm: float = 1.0, overflow: bool = False) -> tuple[bool, bool]:
    """(skipped, spike) of a step of four tokens."""
    sums = torch.tensor([4 * loss, 4.0], dtype=torch.float64)
    skip, spike = judge(scalar(norm), scalar(float(overflow)), sums)
    return bool(skip), bool(spike)


def test_spikes_are_above_the_running_mean() -> None:
    judge = StepJudge(ChecksConfig(check_for_spiky_loss=True, max_skipped_iterations=1), CPU, ())
    assert [feed(judge, loss) for loss in [5.0, 99.0, *[5.0] * (WARM_UP - 2)]] == [(False, False)] * WARM_UP
    mean = judge.state[0].item()
    assert mean == pytest.approx((5.0 * (WARM_UP - 1) + 99.0) / WARM_UP)
    assert feed(judge, 2.01 * mean) == (True, True)
    assert judge.state[0].item() == mean, "a skipped step leaves the mean alone"
    assert feed(judge, 1.99 * mean) == (False, False)
    assert feed(judge, 1.0, norm=1e9) == (False, False), "only losses are checked"


def test_gradient_norms_have_their_own_factor_and_are_only_reported_by_default() -> None:
    judge = StepJudge(ChecksConfig(check_for_large_grads=True, large_grads_factor=3.0), CPU, ())
    for _ in range(WARM_UP):
        feed(judge, 5.0, norm=2.0)
    assert feed(judge, 1e6, norm=5.9) == (False, False)
    assert feed(judge, 5.0, norm=100.0) == (False, True)
    assert judge.state[1].item() > 10, "a step that updates the weights enters the mean"


def test_what_is_not_finite_is_no_spike_and_enters_no_mean() -> None:
    judge = StepJudge(ChecksConfig(check_for_spiky_loss=True), CPU, (5.0, 1.0, 50.0))
    assert feed(judge, math.nan, math.inf, overflow=True) == (False, False)
    assert judge.state.tolist() == [5.0, 1.0, 50.0]


def test_the_mean_forgets() -> None:
    judge = StepJudge(ChecksConfig(check_for_spiky_loss=True), CPU, ())
    for loss in [9.0] * WINDOW + [3.0] * 10 * WINDOW:
        feed(judge, loss)
    assert judge.state[0].item() == pytest.approx(3.0, abs=1e-3)


@pytest.mark.parametrize(
    ("loss", "overflow", "can_fall", "nan"),
    [
        (1.0, False, True, False),
        (1.0, True, True, False),
        (1.0, True, False, True),
        (math.nan, True, True, True),
    ],
)
def test_an_overflow_that_a_lower_loss_scale_mends_is_no_nan(
    loss: float, overflow: bool, can_fall: bool, nan: bool
) -> None:
    values = torch.tensor([math.inf, overflow, overflow, 0.0, loss, 1.0], dtype=torch.float64)
    result = StepResult(values, 2.0, can_fall)
    assert is_nan(result) is nan
    assert result.skipped is overflow
