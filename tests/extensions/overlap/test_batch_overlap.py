"""Tests of two interleaved passes: the order in which their parts run, and error handling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core.pipeline_parallel.actions import Kind
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, build_schedule
from megatron.extensions.speed.overlap.batch_overlap import BatchOverlap
from tests.host_waits import HostWaits
from tests.rules import problems

overlap = BatchOverlap()
Body = Callable[[], None]


def steps(name: str, count: int, log: list[str], fails: bool = False) -> Body:
    def body() -> None:
        for number in range(count):
            log.append(f"{name}{number}")
            overlap.hand_over()
        if fails:
            raise ArithmeticError(name)
        log.append(name)

    return body


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [(2, 2, "F0 B0 F1 B1 F B"), (0, 2, "F B0 B1 B"), (3, 0, "F0 B F1 F2 F"), (1, 3, "F0 B0 F B1 B2 B")],
)
def test_passes_alternate_until_one_ends(first: int, second: int, order: str) -> None:
    for _ in range(20):
        log: list[str] = []
        overlap.run(steps("F", first, log), steps("B", second, log))
        assert " ".join(log) == order
        overlap.hand_over()  # returns immediately, because no other pass is active


@pytest.mark.parametrize(
    ("fail", "order"), [((True, False), "F0 B0"), ((False, True), "F0 B0 F1 B1 F2"), ((True, True), "F0 B0")]
)
def test_an_error_ends_both_passes(fail: tuple[bool, bool], order: str) -> None:
    log: list[str] = []
    with pytest.raises(ArithmeticError, match="F" if fail[0] else "B"):
        overlap.run(steps("F", 1 if fail[0] else 4, log, fail[0]), steps("B", 2, log, fail[1]))
    assert " ".join(log).startswith(order) and log[-1] not in "FB"
    overlap.run(steps("F", 1, log), steps("B", 1, log))
    assert log[-4:] == ["F0", "B0", "F", "B"]


def test_a_backward_pass_yields_midway_and_keeps_the_modes_of_the_caller() -> None:
    log: list[str] = []

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            log.append("B")
            overlap.hand_over()
            grad.sum().item()
            return grad * 2

    x = torch.ones(3, requires_grad=True)
    y = Exchange.apply(Exchange.apply(x)).sum()
    with HostWaits() as seen:
        overlap.run(steps("F", 2, log), y.backward)
    assert log == ["F0", "B", "F1", "B", "F"]
    assert torch.equal(x.grad, torch.full((3,), 4.0))
    assert len(seen.found) >= 2


EXPERTS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1 --mock-data --train-iters 1 "
    "--num-experts 8 --disable-bias-linear "
)
OVERLAP = "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 1), ("interleaved", 2), ("zb-h2", 2)])
def test_a_single_micro_batch_runs_without_alternation(schedule: str, pp: int) -> None:
    chunks = PIPELINE_SCHEDULES.facts(schedule).chunks
    for microbatches in (1, 8):
        lists = build_schedule(schedule, pp, microbatches, chunks, None, True)
        turns = any(action.kind is Kind.FB for actions in lists for action in actions)
        flags = f"{OVERLAP} --ep 2 --pp {pp} --pipeline-schedule {schedule} --global-batch-size {2 * microbatches}"
        found = [line for line in problems(flags, 2 * pp, EXPERTS) if "one micro-batch" in line]
        assert turns == (microbatches > 1) == (not found)
