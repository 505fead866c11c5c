"""Tests of launchers other than torchrun."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megatron.training.reliability.launch import Launch, first_host
from tests.apart import LAUNCHER, ROOT, losses_in
from tests.forked import run_forked
from tests.limits import HANG
from tests.tiny import TINY

FLAGS = f"{TINY} --train-iters 2 --log-interval 1".split()


def start(metrics: Path, environ: dict[str, str], *flags: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER} | environ
    command = [sys.executable, "pretrain_gpt.py", *FLAGS, *flags, "--metrics-file", str(metrics)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def step_of(job: int) -> int:
    """Return a SLURM step number from which a free port is derived. The port is below the ephemeral ports of the
    system, and above the ports that other tests use."""
    for port in range(30_200 + job * 101 % 2_500, 32_768):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return (port - 20_000 - 31 * job) % 20_000
    raise OSError("no free port")


def test_srun_starts_one_task_per_rank(tmp_path: Path) -> None:
    """The rank, the world size and the rendezvous address are determined by SLURM's environment variables alone."""
    run_forked(1, [*FLAGS, "--metrics-file", str(tmp_path / "one.jsonl")], tmp_path / "screen")
    job = os.getpid()
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step_of(job)), "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NODELIST": "localhost"}
    tasks = [
        start(tmp_path / "two.jsonl", step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}, "--tp", "2")
        for rank in range(2)
    ]
    for process in tasks:
        out, _ = process.communicate(timeout=HANG)
        assert process.returncode == 0, out
    assert losses_in(tmp_path / "two.jsonl") == pytest.approx(losses_in(tmp_path / "one.jsonl"), rel=1e-5)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu007", "gpu007"),
        ("gpu[003-006,9],login", "gpu003"),
        ("a-1,b-2", "a-1"),
        ("n[12,14]", "n12"),
        ("login,gpu[3-4]", "login"),
        ("node[1-2]-ib", "node1-ib"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("rack[0-1]node[01-02]-[7,8]", "rack0node01-7"),
        ("[3-4]", "3"),
        (",n1,n2", "n1"),
        ("n[2,1]", "n2"),
    ],
)
def test_the_first_host_of_a_node_list_is_found(nodes: str, first: str, tmp_path: Path) -> None:
    assert first_host(nodes) == first
    # only newer versions of scontrol accept a suffix after a range
    if shutil.which("scontrol") and not nodes.endswith("-ib"):
        (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")
        environ = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
        names = subprocess.run(["scontrol", "show", "hostnames", nodes], env=environ, capture_output=True, text=True)
        assert names.stdout.splitlines()[0] == first, names.stderr


@pytest.mark.parametrize("nodes", ["", ",", "n[1-3", "n[]", "n[,2]", "n[a-b]", "n[1-2]]", "n[-2]", "[[1]]"])
def test_a_malformed_node_list_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST=.* set MASTER_ADDR"):
        first_host(nodes)
    environ = {"SLURM_STEP_NODELIST": nodes, "MASTER_ADDR": "node1"}
    Launch(0, 2, 0, "srun").export(environ)
    assert environ["MASTER_ADDR"] == "node1"


def test_torchrun_variables_take_precedence_over_slurm() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert Launch.from_environment(environ) == Launch(3, 8, 1, "torchrun")
    assert Launch.from_environment({}) == Launch()
    assert Launch.from_environment(environ | {"LOCAL_WORLD_SIZE": "2"}).several_hosts
    assert not Launch.from_environment(environ | {"LOCAL_WORLD_SIZE": "8"}).several_hosts
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    assert Launch.from_environment(slurm | {"SLURM_STEP_NUM_NODES": "2"}).several_hosts
    assert not Launch.from_environment(slurm | {"SLURM_STEP_NUM_NODES": "1"}).several_hosts
