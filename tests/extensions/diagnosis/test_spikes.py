"""Tests of the rules that decide which steps are loss spikes."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.extensions.observe.diagnosis.spikes import WARM_UP, WINDOW, StepJudge
from megatron.training.config.arguments import parse_args


def judge_of(flags: str, means: tuple[float, ...] = ()) -> StepJudge:
    return StepJudge(parse_args(flags.split()), torch.device("cpu"), means)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def feed(judge: StepJudge, loss: float, norm: float = 1.0, overflow: bool = False) -> tuple[bool, bool]:
    """Judge a step with four tokens, and return two booleans: True if the step is skipped, and True if the step is a
    spike."""
    sums = torch.tensor([4 * loss, 4.0], dtype=torch.float64)
    skip, spike = judge(scalar(norm), scalar(float(overflow)), sums)
    return bool(skip), bool(spike)


def test_spikes_are_above_the_running_mean() -> None:
    judge = judge_of("--check-for-spiky-loss --max-skipped-iterations 1")
    assert [feed(judge, loss) for loss in [5.0, 99.0, *[5.0] * (WARM_UP - 2)]] == [(False, False)] * WARM_UP
    mean = judge.state[0].item()
    assert mean == pytest.approx((5.0 * (WARM_UP - 1) + 99.0) / WARM_UP)
    assert feed(judge, 2.01 * mean) == (True, True)
    assert judge.state[0].item() == mean, "a skipped step leaves the mean alone"
    assert feed(judge, 1.99 * mean) == (False, False)
    assert feed(judge, 1.0, norm=1e9) == (False, False), "only losses are checked"


def test_gradient_norms_have_a_separate_factor_and_are_only_reported_by_default() -> None:
    judge = judge_of("--check-for-large-grads --large-grads-factor 3")
    for _ in range(WARM_UP):
        feed(judge, 5.0, norm=2.0)
    assert feed(judge, 1e6, norm=5.9) == (False, False)
    assert feed(judge, 5.0, norm=100.0) == (False, True)
    assert judge.state[1].item() > 10, "a step that updates the weights enters the mean"


def test_non_finite_values_are_not_spikes_and_do_not_enter_the_mean() -> None:
    judge = judge_of("--check-for-spiky-loss", (5.0, 1.0, 50.0))
    assert feed(judge, math.nan, math.inf, overflow=True) == (False, False)
    assert judge.state.tolist() == [5.0, 1.0, 50.0]


def test_old_losses_fade_from_the_running_mean() -> None:
    judge = judge_of("--check-for-spiky-loss")
    for loss in [9.0] * WINDOW + [3.0] * 10 * WINDOW:
        feed(judge, loss)
    assert judge.state[0].item() == pytest.approx(3.0, abs=1e-3)
