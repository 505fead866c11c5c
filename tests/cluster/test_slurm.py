"""Tests of scripts/train_gpt_slurm.sh and of `srun python pretrain_gpt.py` on the nodes of a real SLURM cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import ROOT, missing
from tests.cluster.slurm import SlurmBox, slurm_box
from tests.cluster.test_hosts import MODEL, trained
from tests.forked import run_forked
from tests.slurm.cluster import MISSING

WHY = missing() or (f"SLURM is not installed: no {', '.join(MISSING)}" if MISSING else "")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

STANDIN = """#!/usr/bin/env bash
echo "$(hostname) of $SLURM_JOB_NUM_NODES, $SLURM_CPUS_PER_TASK cores: $*"
printf 'name=DONE\\nwhy=by the stand-in\\n' >"$OUTCOME_FILE"
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmBox]:
    with slurm_box(2) as slurm:
        yield slurm


def log_of(folder: Path) -> str:
    logs = [folder / "log", *sorted(folder.glob("logs/node-*.log"))]
    return "\n".join(path.read_text() for path in logs if path.exists())


def test_the_script_starts_a_launcher_on_each_node(slurm: SlurmBox, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(STANDIN)
    python.chmod(0o755)
    job = slurm.submit(tmp_path / "job", "pretrain_gpt.py", "--flag", PYTHON=str(python))
    assert slurm.ended(job)["JobState"] == "COMPLETED", log_of(tmp_path / "job")
    meeting = f"host0:{20000 + int(job) % 20000}"
    for node in range(2):
        said = (tmp_path / f"job/logs/node-{node}.log").read_text()
        assert said.startswith(f"host{node} of 2, 2 cores: -m torch.distributed.run --nnodes 2 --nproc-per-node 2")
        assert f"--rdzv-endpoint {meeting}" in said and said.endswith("pretrain_gpt.py --flag\n")
    assert f"2 nodes (host[0-1]) x 2 processes, rendezvous at {meeting}" in log_of(tmp_path / "job")
    assert log_of(tmp_path / "job").count("start 1: done: by the stand-in") == 1


def test_training_on_two_nodes_equals_one_process(slurm: SlurmBox, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole"):
        pytest.skip("starts eight processes that import torch: runs under --whole")
    run_forked(1, [*MODEL, "--save", str(tmp_path / "one")], tmp_path / "screen")
    flags = [*MODEL, "--tp", "2", "--pp", "2"]
    job = slurm.submit(tmp_path / "job", "pretrain_gpt.py", *flags, "--save", tmp_path / "script")
    assert slurm.ended(job)["JobState"] == "COMPLETED", log_of(tmp_path / "job")
    srun = ["srun", "--nodes=2", "--ntasks-per-node=2", "--oversubscribe", f"--chdir={ROOT}", sys.executable]
    slurm.command(*srun, "pretrain_gpt.py", *flags, "--save", tmp_path / "srun")
    for name in ("script", "srun"):
        assert trained(tmp_path / name)[0] == pytest.approx(trained(tmp_path / "one")[0], rel=1e-9)
        assert trained(tmp_path / name)[1] == pytest.approx(trained(tmp_path / "one")[1], rel=1e-9)
