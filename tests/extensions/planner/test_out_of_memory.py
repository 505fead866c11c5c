"""Tests of the messages that a run prints if a device runs out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from unittest import mock

import pytest
import torch

from megatron.extensions.plan.planner import activations, out_of_memory
from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.out_of_memory import explain, flags_of, planned_memory, with_change
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from megatron.training.hooks import registered, tell_of_failure
from megatron.training.reliability.launch import Launch
from tests.tiny import TINY

MODEL = f"{TINY} --hidden-size 64 --seq-length 64 --vocab-size 512 --micro-batch-size 4 --global-batch-size 8 --bf16"
MEASURED = cache(activations.activations_of_ranks)


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "activations_of_ranks", lambda batch, count, plans: MEASURED(batch, count))


SHARDED = {"data_parallel_sharding_strategy": "optim_grads"}


def report(flags: str, device: mock.Mock | None = None, taken: int = 0) -> str:
    error, cuda = torch.OutOfMemoryError("no memory left"), torch.cuda
    with (
        mock.patch.object(cuda, "is_available", return_value=device is not None),
        mock.patch.object(cuda, "get_device_properties", return_value=device),
        mock.patch.object(cuda, "max_memory_reserved", return_value=taken),
        mock.patch.object(cuda, "max_memory_allocated", return_value=taken),
        mock.patch.object(out_of_memory, "SECONDS", 600.0),
    ):
        explain(error, resolve(parse_args(f"{MODEL} {flags}".split()), 2), Launch(world_size=2), None)
    (note,) = error.__notes__
    return note


def planned(flags: str, change: Mapping[str, object] = {}) -> int:
    config = with_change(resolve(parse_args(f"{MODEL} {flags}".split()), 2), change, 2) if change else None
    config = config or resolve(parse_args(f"{MODEL} {flags}".split()), 2)
    return planned_memory(config, 2, 0, PlannerCache()).total


def test_without_a_known_size_the_first_change_that_takes_less_is_named() -> None:
    text = report("--no-use-distributed-optimizer")
    assert "cheapest change that fits: --use-distributed-optimizer (plan: " in text
    for category in ("parameters", "gradients", "optimizer", "activations and working", "total"):
        assert any(line.startswith(f"{category}  ") for line in text.splitlines()), category


@pytest.mark.parametrize(
    "change", [SHARDED, {"micro_batch_size": 2}, {"tensor_model_parallel_size": 2}], ids=["sharded", "batch", "tp"]
)
def test_a_change_is_named_if_it_fits_and_no_cheaper_one_does(change: dict[str, object]) -> None:
    size = planned("", change) + 1
    found = report("", mock.Mock(total_memory=size))
    config = resolve(parse_args(MODEL.split()), 2)
    expected = None
    for candidate in out_of_memory.changes(config):
        if with_change(config, candidate, 2) is not None and planned("", candidate) < size:
            expected = flags_of(candidate)
            break
    assert expected is not None and f"cheapest change that fits: {expected} (plan: " in found


def test_memory_of_other_processes_counts_after_a_change() -> None:
    size = planned("", SHARDED) + 1
    others = 10**6
    device = mock.Mock(total_memory=size)
    assert "cheapest change that fits: " not in report("", device, taken=planned("") + size - others)
    assert "cheapest change that fits: " in report("", device, taken=planned(""))


def test_free_host_memory_is_that_of_a_rank() -> None:
    one = out_of_memory.host_memory_of_a_rank()
    with mock.patch.object(torch.cuda, "device_count", return_value=8):
        assert out_of_memory.host_memory_of_a_rank() == pytest.approx(one / 8, rel=0.5)


def test_no_change_is_named_if_none_fits() -> None:
    assert "no single change is known to fit" in report("", mock.Mock(total_memory=1000))


def test_a_report_that_fails_does_not_hide_the_error() -> None:
    error, other = torch.OutOfMemoryError("no memory left"), ValueError("other")
    callback = registered("plan of the memory", parse_args(MODEL.split()))
    with mock.patch.object(out_of_memory, "memory_report", side_effect=KeyError("broken")):
        tell_of_failure(error, [callback], Launch(world_size=2))
        tell_of_failure(other, [callback], Launch(world_size=2))
    assert not hasattr(other, "__notes__")
    assert error.__notes__ == ["no plan of the memory: KeyError: 'broken'"]
