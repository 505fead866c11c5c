"""Rules of Muon and the precision-aware optimizer."""

from __future__ import annotations

import pytest

from tests.extensions.planner.test_out_of_memory import report
from tests.rules import problems


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ("--muon-momentum 1 --optimizer muon", 1, "--muon-momentum 1.0: must be in [0, 1); the default is 0.9"),
        ("--muon-momentum 0.8", 1, "--muon-momentum 0.8: has no effect without --optimizer muon"),
        ("--muon-nesterov", 1, "--muon-nesterov: has no effect without --optimizer muon"),
        ("--moe-router-skip-muon --optimizer muon", 1, "--moe-router-skip-muon: has no effect without --num-experts"),
        (
            "--optimizer muon --muon-scalar-optimizer muon",
            1,
            "--muon-scalar-optimizer muon: updates whole matrices, which embeddings, norms and biases are not; use ad",
        ),
        (
            "--use-precision-aware-optimizer --data-parallel-sharding-strategy no_shard",
            2,
            "--use-precision-aware-optimizer: cannot be combined with --data-parallel-sharding-strategy no_shard",
        ),
    ],
)
def test_problems(flags: str, world_size: int, expected: str) -> None:
    (found,) = problems(flags, world_size)
    assert found.startswith(expected)


def test_each_flag_that_is_missing_is_named() -> None:
    assert [line.partition("; ")[0] for line in problems("--moe-router-skip-muon", 1)] == [
        f"--moe-router-skip-muon: has no effect without {flag}" for flag in ("--optimizer muon", "--num-experts")
    ]


def test_states_in_fewer_bits_are_named_where_memory_ran_out() -> None:
    assert "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16" in report("")
