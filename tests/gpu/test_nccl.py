"""Tests of runs with several NCCL ranks that share one GPU (--nccl-on-one-gpu). Each rank acts as if it were on a
separate host.

Losses equal those of one process on the CPU under every kind of layout. A checkpoint can be loaded under a different
layout. If a rank is killed, or if ranks call different collectives, the run ends with a message that names these ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apart import python_apart
from tests.extensions import needs
from tests.gpu.shared_gpu import NCCL, Ranks, ranks_of

FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --mock-data "
    "--global-batch-size 8 --micro-batch-size 1 --train-iters 5 --lr 1e-3 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --no-compile --fp32"
).split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm"
SECONDS = "--startup-timeout-minutes 1 --distributed-timeout-minutes 0.5"

LAYOUTS = [
    (2, "--tp 2"),
    (2, "--tp 2 --sequence-parallel"),
    (2, "--pp 2"),
    (2, "--pp 2 --num-layers-per-virtual-pipeline-stage 1"),
    needs("zero_bubble", 2, "--pp 2 --pipeline-schedule zb-h1 --untie-embeddings-and-output-weights"),
    needs("zero_bubble", 2, "--pp 2 --pipeline-schedule zb-v --untie-embeddings-and-output-weights"),
    (2, "--cp 2"),
    needs("context_parallel", 2, "--cp 2 --cp-comm-type a2a"),
    needs("context_parallel", 2, "--cp 2 --cp-comm-type all_gather"),
    (2, f"--dp 2 --ep 2 {EXPERTS}"),
    (2, "--dp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    (2, "--dp 2 --data-parallel-sharding-strategy optim_grads"),
    (2, "--dp 2 --data-parallel-sharding-strategy optim_grads_params"),
    needs("overlap", 2, "--tp 2 --sequence-parallel --tp-comm-overlap"),
    (4, "--tp 2 --pp 2 --sequence-parallel"),
    (4, "--dp 4 --use-distributed-optimizer --num-distributed-optimizer-instances 2"),
]


def launch(ranks: Ranks, size: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `size` ranks under torchrun, over NCCL on the first GPU or over gloo on the CPU."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "--no-python"]
    command = [*launcher, "bash", "scripts/rank_as_host.sh", sys.executable, "pretrain_gpt.py", *FLAGS, *flags]
    return python_apart(*command, *(["--cpu"] if ranks.device == "cpu" else []))


def losses(metrics: Path) -> list[float]:
    return [record["lm_loss"] for record in map(json.loads, metrics.read_text().splitlines()) if "lm_loss" in record]


def model_of(flags: str) -> list[str]:
    """Return the flags in `flags` that change the model, not only the layout."""
    untied = ["--untie-embeddings-and-output-weights"] if "--untie-embeddings-and-output-weights" in flags else []
    return [*untied, *(EXPERTS.split() if EXPERTS in flags else [])]


def alone(metrics: Path, *flags: str) -> list[float]:
    """Return the losses of a one-process run on the CPU."""
    python_apart("pretrain_gpt.py", *FLAGS, *flags, "--cpu", "--metrics-file", str(metrics), code=0)
    return losses(metrics)


@pytest.mark.parametrize(("size", "flags"), LAYOUTS)
def test_losses_match_one_process(size: int, flags: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    here = ranks_of(request, NCCL)
    wanted = alone(tmp_path / "one.jsonl", *model_of(flags))
    done = launch(here, size, *flags.split(), *SECONDS.split(), "--metrics-file", str(tmp_path / "all.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(wanted) == 5
    assert losses(tmp_path / "all.jsonl") == pytest.approx(wanted, rel=1e-3 if here == NCCL else 1e-5)


def test_a_checkpoint_loads_at_another_layout(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    here = ranks_of(request, NCCL)
    wanted = alone(tmp_path / "one.jsonl")
    saving = ["--save", str(tmp_path / "run"), "--save-interval", "3", "--exit-interval", "3"]
    first = launch(here, 2, "--tp", "2", "--sequence-parallel", *SECONDS.split(), *saving)
    assert first.returncode == 0, first.stdout + first.stderr
    loading = ["--load", str(tmp_path / "run"), "--metrics-file", str(tmp_path / "rest.jsonl")]
    second = launch(here, 4, "--pp", "2", "--dp", "2", "--use-distributed-optimizer", *SECONDS.split(), *loading)
    assert second.returncode == 0, second.stdout + second.stderr
    assert losses(tmp_path / "rest.jsonl") == pytest.approx(wanted[3:], rel=1e-3)


FAULT = """
import os, signal

import torch

from megatron.training.extensions import CALLBACKS
from megatron.training.hooks import Callback


@CALLBACKS.register("fault")
class Fault(Callback):
    def on_setup(self, runtime):
        self.rank, self.device = runtime.launch.rank, runtime.device

    def on_step_end(self, run):
        if self.rank == 1 and run.progress.iteration == 2:
            {fault}
"""
FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "another collective": "torch.distributed.all_reduce(torch.ones(7, device=self.device))",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_run_and_is_named(fault: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    here = ranks_of(request, NCCL)
    (tmp_path / "fault.py").write_text(FAULT.format(fault=FAULTS[fault]))
    done = launch(here, 2, "--tp", "2", *SECONDS.split(), "--extension", str(tmp_path / "fault.py"))
    assert done.returncode != 0
    assert "rank 1 of 2" in done.stdout + done.stderr, done.stdout + done.stderr
