"""A pipeline executor runs exactly its action list. Outputs are freed when they have been sent, and weight gradients
are accumulated by the actions that compute them.

tests/parity/test_matrix.py compares the losses and gradients with a one-process run.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.parallel_state import Axis
from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.p2p import PipelineP2P
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import layout_of, splits_backward
from megatron.testing.snapshot import first_difference
from megatron.training.evaluation import summed_loss
from megatron.training.train_step import train_step
from tests.harness import run_world, running, train_in_world
from tests.tiny import TINY

CASES = [("1f1b", 4, 1, 8), ("interleaved", 4, 2, 7), ("zb-h1", 3, 1, 7), ("zb-v", 4, 2, 7), ("zb-h2", 4, 1, 8)]
CASES += [("1f1b", 1, 1, 3), ("gpipe", 2, 1, 20)]  # 20 micro-batches exceed the limit on messages in flight


def flags_of(schedule: str, p: int, m: int) -> list[str]:
    flags = f"--num-layers 8 --fp64 --pp {p} --pipeline-schedule {schedule} --micro-batch-size 1 --eval-iters 1"
    return f"{TINY} {flags} --global-batch-size {m}".split()


class FreedOnceSent:
    """Forward hook for all stages except the last. The hook asserts that all earlier outputs have been freed, because
    these outputs have been sent."""

    def __init__(self) -> None:
        self.outputs: list[weakref.ref[Tensor]] = []

    def __call__(self, stage: nn.Module, args: object, output: Tensor) -> None:
        assert all(earlier() is None for earlier in self.outputs), "an output outlives its send"
        self.outputs.append(weakref.ref(output))


def run_pipeline(rank: int, world_size: int, schedule: str, m: int) -> tuple[list[Action], set[Kind], float]:
    """Evaluate a pipeline model once, and then run one training step. Return the executed actions, the kinds of actions
    that accumulated weight gradients of linear layers, and the evaluation loss."""
    with running(flags_of(schedule, world_size, m), rank, world_size) as run:
        executor, ran, added_in = run.pipeline.executor, list[Action](), set[Kind]()
        found = summed_loss(run, run.data.valid[""], 0, 1, "valid")
        assert found is not None and not any(buffer.grad_data.any() for buffer in run.ddp.buffers)
        for number, stage in run.stages.items():
            if number < run.pipeline.layout.num_stages - 1:
                stage.register_forward_hook(FreedOnceSent())
            for name, parameter in stage.named_parameters():
                if ".linear_" in name and name.endswith("weight"):
                    parameter.on_main_grad = lambda: added_in.add(executor.current.kind)  # type: ignore[union-attr]
        executor.after = ran.append
        train_step(run)
        return ran, added_in, found[0] / found[1]


@pytest.mark.parametrize(("schedule", "p", "v", "m"), CASES)
def test_a_rank_runs_exactly_its_list(schedule: str, p: int, v: int, m: int) -> None:
    ((*_, evaluated),) = run_world(1, run_pipeline, "1f1b", m)
    for rank, (ran, added_in, loss) in enumerate(run_world(p, run_pipeline, schedule, m)):
        assert ran == list(pipeline_lists(schedule, p, m, v)[rank])
        assert added_in == {Kind.W if splits_backward(schedule) else Kind.B}
        assert loss == pytest.approx(evaluated, rel=1e-12)


@pytest.mark.parametrize(("schedule", "p", "v", "m"), CASES[:4])
def test_message_lanes_change_no_result(schedule: str, p: int, v: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses four process groups for the messages, as a run with the NCCL backend does. The results must be the
    same as with a single group."""
    plain, build = train_in_world(p, flags_of(schedule, p, m), steps=1), parallel_state.build_parallel_state

    def build_with_lanes(*args: Any) -> parallel_state.ParallelState:
        state = build(*args[:3], backend="nccl")
        assert len({lane.group for lane in state.lanes}) == 4
        return state

    monkeypatch.setattr(parallel_state, "build_parallel_state", build_with_lanes)
    assert first_difference(plain, train_in_world(p, flags_of(schedule, p, m), steps=1), 0.0) is None


class Broken(nn.Module):
    def forward(self, hidden: Tensor | None, batch: object) -> Tensor:
        raise ArithmeticError("no such number")


def test_an_error_names_the_action() -> None:
    p2p = PipelineP2P(Axis(), (3, 2, 5), torch.float64, torch.device("cpu"))
    executor = PipelineExecutor({0: Broken()}, layout_of("1f1b", 1), p2p)
    with pytest.raises(ArithmeticError, match="no such number") as error:
        executor.run(pipeline_lists("1f1b", 1, 1)[0], [None])
    assert error.value.__notes__ == ["pipeline rank 0 was running F(stage 0, microbatch 0)"]
