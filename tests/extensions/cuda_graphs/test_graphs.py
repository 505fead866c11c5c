"""Tests of micro-batches that are recorded as CUDA graphs. On CPU, a fake recorder replaces CUDA graphs: each replay
runs the recorded functions again and writes to the same memory. `tests/gpu/test_training.py` tests actual CUDA graphs
on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.extensions.speed.cuda_graphs.flags import CudaGraphFlags
from megatron.extensions.speed.cuda_graphs.graphed_microbatches import GraphedMicrobatches, GraphedPipeline, SideStream
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve
from megatron.training.initialize import Runtime
from megatron.training.progress import Interval
from megatron.training.reliability.launch import Launch
from megatron.training.run import TrainingRun
from megatron.training.step_parts import STEP_PARTS
from megatron.training.train_step import train_step
from tests.extensions import needs
from tests.extensions.phases import test_phases as phases
from tests.harness import run_world, running

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --mock-data --lr 1e-2 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --eval-iters 0 "
    "--num-workers 0"
)
CPU = torch.device("cpu")


class FakeRecorder:
    """Recorder that computes nothing during recording. Each replay computes the recorded outputs and writes them to the
    same memory."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.recorded += 1
        result = torch.full((), torch.nan, dtype=torch.get_default_dtype())

        def replay() -> None:
            self.replayed += 1
            result.copy_(run())

        return result, replay


def use_graphs(run: TrainingRun, recorder: FakeRecorder) -> None:
    """Replace the run's pipeline with a pipeline that records its micro-batches."""
    before = run.pipeline
    run.pipeline = GraphedPipeline(run.config, run.runtime, before.stages, before.passes, recorder)
    run.pipeline.executor.timed = run.timers
    run.forward_backward = replace(run.forward_backward, pipeline=run.pipeline)


def train(rank: int, world_size: int, flags: str, graphs: bool) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
    """Train five steps. Return the loss sum of each step, the final weights, and the numbers of recorded and replayed
    graphs."""
    with running([*MODEL.split(), "--cpu", *flags.split()], rank, world_size) as run:
        recorder = FakeRecorder()
        if graphs:
            use_graphs(run, recorder)
        interval = run.interval = Interval()
        for _ in range(5):
            train_step(run)
        seen = recorder.recorded, recorder.replayed
        return interval.losses, [param.detach().clone() for param in run.ddp.params], seen


PART = [
    (1, "--bf16 --recompute-granularity full --recompute-num-layers 1 --recompute-method uniform"),
    (1, "--fp16 --initial-loss-scale 1024 --loss-scale-window 2"),
    needs("fp8", 1, "--bf16 --fp8-format hybrid --fp8-recipe delayed"),
]
MORE = [(1, "--fp32 --mtp-num-layers 2"), (2, "--fp32 --dp 2 --window-size 6")]


@pytest.mark.grid(("world_size", "flags"), PART, [*PART, *MORE])
def test_a_replayed_run_is_bit_identical(world_size: int, flags: str) -> None:
    microbatches = 4 // world_size
    both = (run_world(world_size, train, flags, graphs) for graphs in (False, True))
    for plain, graphed in zip(*both, strict=True):
        torch.testing.assert_close(plain[:2], graphed[:2], rtol=0, atol=0)
        # With fp8, there are two recordings, of which only one casts the weights.
        recordings = 2 if "fp8" in flags else 1
        assert graphed[2] == (recordings, 2 * microbatches), "two of five steps come after the warm-up"


def test_weights_are_cast_once_a_step() -> None:
    casts, made = WeightCasts(), list[int]()
    weight = torch.ones(2, 2)

    def run(batch: Batch, seed: Tensor) -> Tensor:
        with casts.kept():  # like the executor, keep the casts of each micro-batch until the end of the micro-batch
            scaled = casts.get(weight, "rows", lambda: made.append(1) or weight * len(made))
        return scaled.sum() * seed

    graphed = GraphedMicrobatches(run, FakeRecorder(), 1, CPU, torch.float32, casts)
    batch = Batch.of_tokens(torch.arange(8).view(2, 4))
    for step in (1, 2, 3):
        assert graphed.train([batch] * 3, 1.0) == [4.0 * step] * 3
        assert len(made) == step


def test_a_graph_is_not_replayed_for_another_shape() -> None:
    graphed = GraphedMicrobatches(lambda batch, seed: seed * batch.tokens.sum(), FakeRecorder(), 1, CPU, torch.float32)
    batch = Batch.of_tokens(torch.arange(8).view(2, 4))
    assert [graphed.train([batch], 2.0), graphed.train([batch], 3.0)] == [[56.0], [84.0]]
    other = Batch.of_tokens(torch.arange(4).view(1, 4))
    with pytest.raises(AssertionError, match=r"tokens is \(1, 4\), recorded \(2, 4\)"):
        graphed.train([other], 1.0)
    with pytest.raises(AssertionError, match="recorded with"):
        graphed.train([replace(batch, position_ids=batch.tokens)], 1.0)
    with pytest.raises(AssertionError, match="document boundaries"):
        graphed.train([replace(batch, documents=((0,), (0, 2)))], 1.0)
    first, second = graphed.train([batch, replace(batch, tokens=batch.tokens + 1)], 1.0)
    assert (first, second) == (28.0, 36.0), "a loss is copied before the next replay"


def config_of(flags: str, world_size: int = 1) -> RunConfig:
    return resolve(parse_args([*MODEL.split(), *flags.split()]), world_size)


def test_flag_spellings_are_accepted() -> None:
    assert config_of("--enable-cuda-graph").options(CudaGraphFlags).cuda_graph_impl == "local"
    assert parse_args("--cuda-graph-impl transformer_engine".split()).options(CudaGraphFlags).cuda_graph_impl == "none"


def test_cuda_graphs_without_a_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match="--cuda-graph-impl local records GPU work, but this run uses CPUs"):
        SideStream(config_of("--cuda-graph-impl local")).on_setup(Runtime(Launch(), CPU, ParallelState()))
    assert STEP_PARTS.wanted(config_of("")) == []


def test_phases_of_two_shapes_are_refused(tmp_path: Path) -> None:
    flags = "--mock-data --train-iters 9 --cuda-graph-impl local"
    found = phases.problems(tmp_path / "s.yaml", "- {}\n- {from-samples: 8, seq-length: 32}", flags)
    assert any("--cuda-graph-impl local: needs one shape, but phases differ" in problem for problem in found)
