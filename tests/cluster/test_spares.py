"""If a host fails under scripts/train_gpt_elastic.sh, a spare host takes over its ranks. If a task fails under srun, a
spare task takes over its rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.faults import Run, difference
from tests.cluster.hosts import ROOT, Box, hosts, missing
from tests.cluster.test_hosts import MODEL, trained
from tests.forked import run_forked
from tests.limits import HANG
from tests.slurm.cluster import MISSING, running_cluster

FLAGS = "--peer-copies 1 --restarts-in-job 2 --spare-ranks 1".split()
BUSY = "--host-heartbeat-timeout-seconds 20".split()
"""Flags for a busy machine, where a process may pause for several seconds."""

TASK = """
import os, signal, sys
task = os.environ["SLURM_PROCID"]
os.environ["PEER_COPY_HOST"] = f"host{task}"
import pretrain_gpt
from megatron.training import training
whole = training.train_step
def step(run):
    if (task, os.environ["START_IN_JOB"], run.progress.iteration) == ("1", "0", 2):
        os.kill(os.getppid(), signal.SIGKILL)
    whole(run)
training.train_step = step
sys.exit(pretrain_gpt.main())
"""


@pytest.fixture(autouse=True)
def whole(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole"):
        pytest.skip("starts processes that import torch: runs under --whole")


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_spare_replaces_a_lost_host_under_the_elastic_script(tmp_path: Path) -> None:
    with hosts(3, "1gbit") as box:
        run = Run(box, 1, tmp_path, [*FLAGS, *BUSY], {"PACE": "0.2", "RENDEZVOUS_PATIENCE": "10"})
        for host in range(3):
            run.start(host)
        run.wait(lambda: " iteration        4/" in run.screens()[0], "the first steps, of which copies are complete")
        before = run.marks()
        Box.kill_host(box, 1)
        run.wait(lambda: run.last_world(before) == 2, "a step with the spare")
        # Without this file, the other launchers would wait five minutes for the launcher of the lost host.
        (run.save / "exit").touch()
        run.wait(lambda: "exiting at iteration" in run.screens()[0], "the end of the ranks")
    last = int((run.save / "latest_checkpointed_iteration.txt").read_text())
    said = "\n".join(run.since(before))
    assert "rank 1 now runs in spare process 2 of the launcher" in said
    assert "recovered by spare ranks in the job from copies in memory" in said and "steps lost: 0" in said
    assert difference(run, last) < 1e-9


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_spare_replaces_the_host_of_the_store(tmp_path: Path) -> None:
    with hosts(3, "1gbit") as box:
        flags = ["--peer-copies", "1", "--restarts-in-job", "2", *BUSY]
        run = Run(box, 1, tmp_path, flags, {"PACE": "0.2", "RENDEZVOUS_PATIENCE": "3"})
        for host in range(3):
            run.start(host)
        run.wait(lambda: " iteration        4/" in run.screens()[0], "the first steps, of which copies are complete")
        before = run.marks()
        Box.kill_host(box, 0)
        run.wait(lambda: run.last_world(before) == 2, "a step of the hosts that are left")
        (run.save / "exit").touch()
        run.wait(lambda: any("exiting at iteration" in text for text in run.since(before)), "the end of the ranks")
    last = int((run.save / "latest_checkpointed_iteration.txt").read_text())
    assert "recovered by restart by the launcher from copies in memory" in "\n".join(run.since(before))
    assert difference(run, last) < 1e-9


@pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed: no {', '.join(MISSING)}")
def test_a_spare_replaces_a_lost_task_under_srun(tmp_path: Path) -> None:
    run_forked(1, [*MODEL, "--save", str(tmp_path / "one")], tmp_path / "screen")
    (tmp_path / "task.py").write_text(TASK)
    save = str(tmp_path / "save")
    with running_cluster():
        words = ["srun", "--ntasks=3", "--nodes=1", "--oversubscribe", "--kill-on-bad-exit=0", sys.executable]
        words += [str(tmp_path / "task.py"), *MODEL, "--save", save, "--load", save, *FLAGS]
        outer = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(
            words, env=outer | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=HANG
        )
    said = done.stdout + done.stderr
    assert "recovered by spare ranks in the job from copies in memory" in said, said[-6000:]
    for mine, others in zip(trained(tmp_path / "save"), trained(tmp_path / "one"), strict=True):
        assert mine == pytest.approx(others, rel=1e-9)
