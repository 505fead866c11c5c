"""Which overflows are those of fp16's loss scale."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import StepResult
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
def test_an_overflow_that_a_lower_loss_scale_mends_is_no_nan(
    loss: float, overflow: bool, can_fall: bool, nan: bool
) -> None:
    values = torch.tensor([math.inf, overflow, overflow, 0.0, loss, 1.0], dtype=torch.float64)
    result = StepResult(values, 2.0, can_fall)
    assert is_nan(result) is nan
    assert result.skipped is overflow
