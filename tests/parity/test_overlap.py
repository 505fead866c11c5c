"""Test that data parallelism with overlapped collectives gives bit-identical results to data parallelism without
overlap, even if the network is slow.

To simulate the slowest possible network, an all-gather is executed only when code waits for it. Code that reads a
parameter without waiting would read the value of the previous step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.distributed.param_and_grad_buffer import Bucket, BufferKind, ParamAndGradBuffer
from megatron.core.distributed.param_layout import plan_buffers
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import build_parallel_state
from megatron.core.param_meta import ParamMeta
from megatron.testing.local_world import run_world
from megatron.testing.snapshot import first_difference
from megatron.training.evaluation import summed_loss
from megatron.training.tasks import save
from megatron.training.train_step import train_step
from tests.harness import running, train_in_world
from tests.tiny import TINY

COMMON = f"{TINY} --num-layers 5 --global-batch-size 8 --ddp-bucket-size 700 --eval-iters 1 --fp64"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
LAYOUTS = [
    (2, "--dp 2", OVERLAP),
    (2, "--dp 2 --no-use-distributed-optimizer", "--overlap-grad-reduce"),
    (4, "--dp 2 --tp 2 --sequence-parallel --recompute-activations", OVERLAP),
    (4, "--dp 2 --pp 2 --pipeline-schedule interleaved", OVERLAP),
    (4, "--dp 2 --pp 2 --pipeline-schedule zb-h2 --untie-embeddings-and-output-weights", OVERLAP),
    (4, "--dp 2 --pp 2 --pipeline-schedule zb-v", OVERLAP),
    (4, "--dp 2 --cp 2", OVERLAP),
    (4, "--dp 4 --ep 2 --disable-bias-linear --num-experts 4 --moe-router-topk 2", OVERLAP),
]


class Late:
    """Collective that is executed only when `wait` is called."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run

    def wait(self) -> None:
        self.run()


@pytest.fixture
def slow_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Bucket.start_param_sync

    def start_late(self: Bucket) -> None:
        assert self._param_sync is None

        def gather() -> None:
            self._param_sync = None
            start(self)
            assert self._param_sync is not None
            self._param_sync.wait()

        if self.shard_grads and self.axis.size > 1:
            self._param_sync = Late(gather)

    monkeypatch.setattr(Bucket, "start_param_sync", start_late)


@pytest.mark.grid("case", LAYOUTS[::3], LAYOUTS)
def test_no_parameter_is_read_before_it_has_arrived(case: tuple[int, str, str], slow_gather: None) -> None:
    """Run two steps without reading their results, so that no read waits for the parameters. The third step must then
    be bit-identical to the same step without overlap."""
    world_size, layout, overlap = case
    argv = [*COMMON.split(), *layout.split()]
    waiting, found = (train_in_world(world_size, [*argv, *more.split()], 1, unseen=2) for more in ("", overlap))
    assert not found.replica_errors
    assert first_difference(waiting, found, 0.0) is None


def evaluate_and_save(rank: int, world_size: int, flags: str) -> float:
    with running(f"{COMMON} {flags}".split(), rank, world_size) as run:
        train_step(run)
        found = summed_loss(run, run.data.valid[""], 0, run.config.training.eval_iters, "valid")
        assert found is not None
        loss = found[0] / found[1]
        train_step(run)
        save(run)
        run.optimizer.finish_param_sync()
        return loss


def weights_loaded(rank: int, world_size: int, flags: str) -> dict[str, torch.Tensor]:
    with running(f"{COMMON} {flags}".split(), rank, world_size) as run:
        assert run.progress.iteration == 2
        return {param.meta.name: param.detach().clone() for param in run.ddp.params}  # type: ignore[attr-defined]


def test_evaluation_and_checkpoints_wait(slow_gather: None, tmp_path: Path) -> None:
    results = {}
    for name, overlap in (("plain", ""), ("overlapped", OVERLAP)):
        folder = f"--save {tmp_path / name} --load {tmp_path / name} --no-async-save --no-save-optim --no-load-optim"
        losses = run_world(2, evaluate_and_save, f"--dp 2 {folder} {overlap}")
        results[name] = losses, run_world(1, weights_loaded, folder)
    assert results["plain"][0] == results["overlapped"][0]
    torch.testing.assert_close(results["plain"][1], results["overlapped"][1], rtol=0, atol=0)


def early_starts(rank: int, world_size: int, flags: str) -> list[tuple[int, int]]:
    """Run three steps, and return one tuple per step. The tuple contains the number of gradient reductions that have
    started by the end of the backward passes, and the total number of gradient reductions."""
    with running(f"{COMMON} {flags}".split(), rank, world_size) as run:
        train, found = run.pipeline.train, []

        def train_and_count(*args: Any, **named: Any) -> Any:
            losses = train(*args, **named)
            found.append((run.ddp._started, len(run.ddp.buckets)))
            return losses

        run.pipeline.train = train_and_count  # type: ignore[method-assign]
        for size in (4, 8, 2):  # as in a batch size ramp-up, each step has a different number of micro-batches
            run.batch_sizes = replace(run.batch_sizes, final=size)
            train_step(run)
        run.optimizer.finish_param_sync()
        return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_every_reduction_starts_during_the_backward(schedule: str) -> None:
    flags = f"--dp 2 --pp 1 --pipeline-schedule {schedule} {OVERLAP}"
    for found in run_world(2, early_starts, flags):
        buckets = found[0][1]
        assert buckets > 3
        assert found == [(0, buckets), (buckets, buckets), (buckets, buckets)]


def reduced(rank: int, world_size: int, shard: bool) -> torch.Tensor:
    state = build_parallel_state(ParallelDims(dp=world_size), rank)
    meta = ParamMeta("decoder.final_layernorm.weight", (300,), role="norm")
    (layout,) = plan_buffers([(meta, (300,))], world_size)
    parameter = torch.nn.Parameter(torch.zeros(300))
    kind = BufferKind(torch.float32, torch.bfloat16, shard)
    buffer = ParamAndGradBuffer(layout, [parameter], state.dp_cp, kind)
    parameter.main_grad.copy_(values(rank))  # type: ignore[attr-defined]
    (bucket,) = buffer.buckets
    bucket.start_grad_sync()
    bucket.finish_grad_sync()
    bucket.gather_grads_()
    return buffer.grad_data[:300]


def values(rank: int) -> torch.Tensor:
    return torch.randn(300, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("shard", [True, False], ids=["zero1", "replicated"])
def test_bf16_reduction_rounds_what_ranks_add_up(shard: bool) -> None:
    expected = (values(0).bfloat16() + values(1).bfloat16()).float()
    for found in run_world(2, reduced, shard):
        assert torch.equal(found, expected)
    assert not torch.equal(expected, values(0) + values(1))
