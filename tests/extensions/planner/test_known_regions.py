"""Regions on tensors without values: results that are known are those that running them would give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.extensions.planner import known_regions
from megatron.extensions.planner.known_regions import run_region


class Pair(NamedTuple):
    values: Tensor
    scales: tuple[Tensor, Tensor]
    name: str


RUNS: list[str] = []


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_regions, "_known", {})
    RUNS.clear()


def cast(x: Tensor, dtype: torch.dtype, wanted: tuple[bool, ...]) -> Pair:
    RUNS.append("cast")
    scale = x.amax()
    return Pair(x.t().contiguous().to(dtype).t(), (scale, scale), f"{wanted}")


def double_(x: Tensor) -> Tensor:
    RUNS.append("double_")
    x.mul_(2)
    return x + 1


def turned(x: Tensor) -> Tensor:
    RUNS.append("turned")
    return x.t()


def half(x: Tensor) -> Tensor:
    RUNS.append("half")
    return (x + 1)[:2]


def spread(x: Tensor) -> Tensor:
    RUNS.append("spread")
    return x.sum(0).expand(4, -1)


def times(x: Tensor, factor: float) -> Tensor:
    RUNS.append("times")
    return x * factor


def test_results_are_new_tensors_of_the_same_kind() -> None:
    x = torch.empty(4, 6, device="meta")
    first, again = (run_region(cast, (x, torch.bfloat16, (True, False))) for _ in range(2))
    assert RUNS == ["cast"]
    assert isinstance(again, Pair) and again.name == first.name and again.scales[0] is again.scales[1]
    for one, other in ((first.values, again.values), (first.scales[0], again.scales[0])):
        assert (one.shape, one.stride(), one.dtype, one.device) == (other.shape, other.stride(), other.dtype, x.device)
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("other", "more"),
    [
        (torch.empty(4, 7, device="meta"), (torch.bfloat16, (True, False))),
        (torch.empty(6, 4, device="meta").t(), (torch.bfloat16, (True, False))),
        (torch.empty(4, 6, device="meta", dtype=torch.float64), (torch.bfloat16, (True, False))),
        (torch.empty(4, 6, device="meta"), (torch.float16, (True, False))),
        (torch.empty(4, 6, device="meta"), (torch.bfloat16, (True, True))),
        (torch.empty(4, 6, device="meta"), (torch.bfloat16, (1, 0))),
    ],
    ids=["shape", "strides", "dtype", "value", "values in a tuple", "type of a value"],
)
def test_operands_that_differ_are_told_apart(other: Tensor, more: tuple[Any, ...]) -> None:
    run_region(cast, (torch.empty(4, 6, device="meta"), torch.bfloat16, (True, False)))
    found = run_region(cast, (other, *more))
    assert RUNS == ["cast", "cast"] and found.name == f"{more[1]}"


@pytest.mark.parametrize("function", [double_, turned, half, spread])
def test_what_is_no_new_tensor_is_run_each_time(function: Callable[[Tensor], Tensor]) -> None:
    """It writes its operand, or its result is a view or holds more or less than its elements."""
    x = torch.empty(4, 6, device="meta")
    for _ in range(2):
        run_region(function, (x,))
    assert len(RUNS) == 2


def test_graphs_values_and_unknown_operands_are_run_each_time() -> None:
    x = torch.empty(4, 6, device="meta", requires_grad=True)
    assert all(run_region(times, (x, 2.0)).grad_fn is not None for _ in range(2))
    assert all((run_region(times, (torch.ones(2), 3.0)) == 3).all() for _ in range(2))
    assert all(run_region(times, (torch.empty(2, device="meta"), mock.MagicMock())) is not None for _ in range(2))
    assert len(RUNS) == 6
    with torch.no_grad():
        found = [run_region(times, (x, 2.0)) for _ in range(2)]
    assert len(RUNS) == 7 and not any(y.requires_grad for y in found)


def test_functions_made_anew_are_not_known_by_their_name() -> None:
    def by(factor: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x.new_empty(factor)

    x = torch.empty(3, device="meta")
    assert [run_region(by(n), (x,)).shape[0] for n in (1, 2)] == [1, 2]
    assert [run_region(partial(times, factor=n), (x,)).shape[0] for n in (1, 2)] == [3, 3] and len(RUNS) == 2


def test_what_is_known_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_regions, "MOST_KNOWN", 4)
    for n in range(1, 20):
        assert run_region(times, (torch.empty(n, device="meta"), 2.0)).shape == (n,)
        assert len(known_regions._known) <= 4
