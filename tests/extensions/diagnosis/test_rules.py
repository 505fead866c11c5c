"""Which flags of diagnosis fit each other and the run."""

from __future__ import annotations

import pytest

from tests.pure.test_validation import problems


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--layer-growth-threshold 2", "--layer-growth-threshold 2.0: has no effect without --log-layer-stats"),
        ("--log-layer-stats 1 --layer-growth-threshold 0.5", "--layer-growth-threshold 0.5: must be 0 or above 1"),
        ("--log-layer-stats -1", "--log-layer-stats -1: must not be negative"),
        ("--log-straggler --straggler-minmax-count 0", "--straggler-minmax-count 0: must be above 0"),
        ("--trace-step-end 20", "--trace-step-end 20: has no effect without --trace"),
        ("--trace --trace-step-start 1 --trace-step-end 1", "--trace-step-end 1: must be above --trace-step-start 1"),
        ("--use-pytorch-profiler", "--use-pytorch-profiler: has no effect without --profile"),
        ("--profile --profile-step-end 3", "--profile-step-end 3: must be above --profile-step-start 10"),
        ("--profile --profile-ranks 1", "--profile-ranks 1: must be below the 1 ranks"),
        ("--trace --trace-step-start 1 --cuda-graph-impl local", "--trace: cannot be combined with --cuda-graph-impl"),
        ("--log-straggler --cuda-graph-impl local", "--log-straggler: cannot be combined with --cuda-graph-impl local"),
        ("--log-layer-stats 1 --cuda-graph-impl local", "--log-layer-stats 1: cannot be combined with --cuda-graph"),
    ],
)
def test_what_is_wrong_is_told(flags: str, told: str) -> None:
    assert any(problem.startswith(told) for problem in problems(flags)), problems(flags)
