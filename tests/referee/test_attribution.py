"""Tests that use plain tensors to check how the referee attributes wrong gradients to causes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.testing.referee.attribution import judge
from megatron.testing.referee.judgement import sample_parts, sequence_parts

ALLOWED = 1e-6


def right() -> Tensor:
    return torch.randn(8, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def with_block(dim: int, count: int, block: int, factor: float) -> Tensor:
    wrong = right()
    wrong.chunk(count, dim)[block].mul_(factor)
    return wrong


def noisy(tensor: Tensor, size: float) -> Tensor:
    return tensor + size * torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(2))


def with_rows(dim: int, rows: list[int], factor: float) -> Tensor:
    wrong = right()
    wrong.movedim(dim, 0)[rows] *= factor
    return wrong


CASES = [
    pytest.param(right() / 2, "is 1/2 times as large", id="averaged twice"),
    pytest.param(right() * 4, "is 4 times as large", id="summed, not averaged"),
    pytest.param(-right(), "is -1 times as large", id="sign"),
    pytest.param(right() * 0.37, "is 0.37 times as large", id="any factor"),
    pytest.param(torch.zeros_like(right()), "is zero", id="zero"),
    pytest.param(with_block(1, 2, 1, 0.0), "block 1 of 2 of dim 1 is zero", id="a shard is missing"),
    pytest.param(with_block(2, 3, 0, 2.0), "block 0 of 3 of dim 2 is 2 times as large", id="a shard counts twice"),
    pytest.param(with_block(0, 8, 5, 0.0), "block 5 of 8 of dim 0 is zero", id="an expert is missing"),
    pytest.param(with_rows(1, [5, 6, 7], 2.0), "rows 5 to 7 of 8 of dim 1: is 2 times as large", id="some rows"),
    pytest.param(with_rows(1, [0, 3, 4], 0.0), "rows 0 and 3 to 4 of 8 of dim 1: is zero", id="rows apart"),
    pytest.param(right().transpose(0, 1), "dims 0 and 1 are transposed", id="transposed"),
    pytest.param(right().roll(4, 0), "the 2 blocks of dim 0 are in the order 1, 0", id="shards are swapped"),
    pytest.param(right()[[0, 3, 2, 1, 4, 5, 6, 7]], "rows 1 and 3 of dim 0 have changed places", id="rows are swapped"),
    pytest.param(
        right()[:, [0, 5, 6, 3, 4, 1, 2, 7]],
        "rows 1 to 2 and 5 to 6 of dim 1 have changed places",
        id="experts are swapped",
    ),
    pytest.param(noisy(right(), 0.01), "nearly proportional (cosine 0.99995", id="coarser format"),
    pytest.param(noisy(right(), 1.0), "a part of the sum is missing or extra (cosine 0.7", id="missing terms"),
    pytest.param(right().flip(0, 1, 2), "unrelated (cosine", id="unrelated"),
]


@pytest.mark.parametrize(("found", "cause"), CASES)
def test_a_cause_is_named(found: Tensor, cause: str) -> None:
    for size in (0.0, ALLOWED / 100):
        verdict = judge(noisy(found, size), right(), ALLOWED)
        assert verdict.cause is not None and verdict.cause.startswith(cause)


def test_rounding_does_not_count_as_a_difference() -> None:
    verdict = judge(noisy(right(), ALLOWED / 10), right(), ALLOWED)
    assert verdict.equal and verdict.cause is None and 0 < verdict.difference < ALLOWED


def test_values_that_are_not_finite_are_counted() -> None:
    wrong = right()
    wrong[0, 0, :2] = torch.nan
    assert judge(wrong, right(), ALLOWED).cause == "2 of 384 values are not finite"


def test_an_arbitrary_factor_of_a_scalar_is_not_a_cause() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert judge(one / 2, one, ALLOWED).explained and not judge(-1.975 * one, one, ALLOWED).explained


def test_sequence_parts_are_described() -> None:
    remarks = dict(sequence_parts(8))
    assert remarks[(4, 5, 6, 7)] == " (block 1 of 2)" and remarks[(7,)] == " (block 7 of 8)"
    assert remarks[(0, 1, 6, 7)] == " (rank 0 of 2 that divide it in zig-zag)" and remarks[(1, 2, 3)] == ""
    assert tuple(range(8)) not in remarks and (0, 2) not in remarks
    of_samples = list(sample_parts(4))
    assert {(0, 2), (1, 3), (0, 1), (3,), (1, 2, 3)} <= {*of_samples} and (0, 1, 2, 3) not in of_samples
