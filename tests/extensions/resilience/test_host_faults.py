"""Tests in which the network cable of a host is unplugged or works in only one direction. Long before collectives time
out, each host must report the other host and exit."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.extensions.operate.resilience import host_watch
from megatron.training import training
from tests.cluster.hosts import Box, hosts, missing
from tests.forked import forked_ranks, join
from tests.limits import wait_for

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

MODEL = (
    "--cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --mock-data "
    "--make-vocab-size-divisible-by 8 --lr 1e-3 --global-batch-size 4 --train-iters 100000 --log-interval 5 "
    "--eval-iters 0 --num-workers 0 --host-heartbeat-timeout-seconds 3"
).split()


Strike = Callable[[Box], None]


def pull(box: Box) -> None:
    box.pull_cable(1)


def deafen(box: Box) -> None:
    box.one_way(1, "in")


def datagrams(box: Box, host: int) -> tuple[int, int]:
    """Return the number of UDP messages that all processes on a host have received, and the number of UDP messages that
    they have sent."""
    lines = box.run(host, "cat", "/proc/net/snmp").splitlines()
    names, values = (line.split() for line in lines if line.startswith("Udp: "))
    counts = dict(zip(names, values, strict=True))
    return int(counts["InDatagrams"]), int(counts["OutDatagrams"])


def await_heartbeats(box: Box) -> None:
    """Wait until each host has read a message that the other host sent after receiving a message itself."""

    def await_read(*numbers: int) -> None:
        wait_for(lambda: all(datagrams(box, host)[0] >= number for host, number in enumerate(numbers)))

    await_read(1, 1)
    await_read(*(datagrams(box, 1 - host)[1] + 1 for host in range(2)))


STRIKES = [
    (pull, False, "host0 (rank 0 of 2) has heard nothing from host1 (rank 1 of 2) for "),
    (deafen, False, "although its own messages arrive: messages to host1 are lost"),
    (deafen, True, ""),
]


@pytest.mark.parametrize(
    ("strike", "early", "line"), STRIKES, ids=["pulled", "deaf", "deaf before its heartbeat knows of others"]
)
def test_both_hosts_name_each_other_and_exit(tmp_path: Path, strike: Strike, early: bool, line: str) -> None:
    look, struck, told = host_watch.HostWatch.look, tmp_path / "struck", [tmp_path / f"told{rank}" for rank in range(2)]

    def late_look(watch: host_watch.HostWatch) -> None:
        rank = watch._launch.rank
        while early and rank == 1 and not struck.exists():
            time.sleep(0.05)
        look(watch)
        if watch._told == 2:  # the heartbeat process knows both hosts
            told[rank].touch()

    def all_told() -> bool:
        return all(file.exists() for file in told)

    with hosts(2) as box:

        def enter(rank: int) -> None:
            log = os.open(tmp_path / f"host{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            box.enter(rank)
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "host0"}
            host_watch.HostWatch.look = late_look

        with forked_ranks(2, [*MODEL, "--save", str(tmp_path / "save")], tmp_path / "screen", enter) as ranks:
            logs = [tmp_path / f"host{rank}.log" for rank in range(2)]
            wait_for(logs[0].exists, ranks)
            wait_for(lambda: " iteration " in logs[0].read_text() and (early or all_told()), ranks, logs[0].read_text)
            if not early:
                await_heartbeats(box)
            strike(box)
            struck.touch()
            assert join(ranks) == [1, 1]
    one, other = (log.read_text() for log in logs)
    if early:  # the other host may end before this host's heartbeat detects the fault
        assert one.count("RUN FAILED: ") == 1 and re.search(r"RUN FAILED: .*\bhost1\b", one), one
    else:
        assert one.count("RUN FAILED: host1 (rank 1 of 2)\n") == 1 and line in one, one
    assert other.count("RUN FAILED: host0 (rank 0 of 2)\n") == 1, other
    assert "host1 (rank 1 of 2) has heard nothing from host0 (rank 0 of 2) for " in other
    assert not (tmp_path / "save" / ".lease").exists()


@pytest.mark.parametrize("pulled", [False, True])
def test_blocked_heartbeats_alone_do_not_lose_a_host(tmp_path: Path, pulled: bool) -> None:
    program, screen = tmp_path / "mute_heartbeat.py", tmp_path / "screen"
    program.write_text(host_watch.PROGRAM.read_text().replace("self._network.sendto(data, address)", "pass"))
    lines = [f"no heartbeat of host{rank} (rank {rank} of 2) has arrived on host{1 - rank} in " for rank in range(2)]
    train_step = training.train_step

    def slow_step(run: training.TrainingRun, *args: Any) -> None:
        time.sleep(0.5)
        train_step(run, *args)

    with hosts(2) as box:

        def enter(rank: int) -> None:
            box.enter(rank)
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "host0"}
            host_watch.PROGRAM = program
            training.train_step = slow_step

        end = [] if pulled else ["--exit-interval", "14"]
        with forked_ranks(2, [*MODEL, *end], screen, enter) as ranks:
            if pulled:
                wait_for(lambda: all(line in screen.read_text() for line in lines), ranks, screen.read_text)
                pull(box)
            assert join(ranks) == ([1, 1] if pulled else [0, 0])
    text = screen.read_text()
    assert all(text.count(line) == 1 for line in lines) and "does a firewall block UDP to port " in text, text
    if pulled:
        assert text.count("host0 (rank 0 of 2) has heard nothing from host1 (rank 1 of 2) for ") == 1, text
