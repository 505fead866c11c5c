"""Which steps are spikes, which overflows are those of fp16's loss scale, and which ranks are slow."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.extensions.diagnosis.flags import DiagnosisConfig
from megatron.extensions.diagnosis.nonfinite_search import BACKWARD, FORWARD, WEIGHT_GRADIENT, Finding
from megatron.extensions.diagnosis.straggler import slowest, straggler_line, straggler_record
from megatron.training.checks.step_guard import WARM_UP, WINDOW, StepJudge, is_nan
from megatron.training.config.run_config import ChecksConfig

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


def finding(where: str, stage: int, place: int, sample: int = 0, rank: int = 0) -> Finding:
    return Finding(where, "module", (sample,), 0, rank, stage, True, place=place)


def test_the_first_finding_is_the_first_in_the_model() -> None:
    ordered = [
        finding(FORWARD, 0, 3, sample=5),
        finding(FORWARD, 0, 3, sample=9),
        finding(FORWARD, 0, 3, sample=9, rank=1),
        finding(FORWARD, 0, 4, sample=1),
        finding(FORWARD, 1, 1),
        finding(BACKWARD, 1, 7),
        finding(BACKWARD, 0, 2),
        finding(WEIGHT_GRADIENT, 1, 0),
    ]
    mixed = ordered[::-1]
    assert sorted(mixed, key=lambda each: each.order) == ordered
    assert Finding.from_json(asdict(ordered[0])) == ordered[0]


def test_slowest_ranks() -> None:
    assert slowest([1.0, 4.0, 2.0, 2.0], 2) == [(1, 4.0, 2.0), (2, 2.0, 1.0)]
    assert slowest([0.0, 0.0], 1) == [(0, 0.0, 1.0)]


def test_record_and_line_of_stragglers() -> None:
    table = [[0.2, 2.0, 4.0, 0.1, 0.2], [0.2, 2.0, 4.0, 0.1, 0.2], [0.2, 6.0, 4.0, 0.1, 0.4]]
    record = straggler_record(table, 2, DiagnosisConfig(log_straggler=True, straggler_minmax_count=2))
    assert (record["straggler_forward_rank"], record["straggler_forward_ratio"]) == (2, 3.0)
    assert record["straggler_forward"] == [[2, 3.0, 3.0], [0, 1.0, 1.0]]
    assert record["straggler_optimizer_seconds"] == pytest.approx(0.2)
    (line,) = straggler_line(record, ["a", "a", "b"])
    assert "forward: rank 2 on b 3000.0 ms (x3.00), rank 0 on a 1000.0 ms (x1.00) | backward" in line
    assert straggler_record(table, 0, DiagnosisConfig()) == {} and straggler_line({}, []) == []
