"""Hosts of a box: what each has of its own, cables that are pulled, slow or deaf on one side, power that fails, and
what is left of a box whose process was killed. Training on two hosts equals one process."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.forked import run_on_hosts
from tests.cluster.hosts import ROOT, Box, Process, bits_per_second, hosts, missing, sweep
from tests.forked import run_forked
from tests.limits import HANG

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

LISTENER = """
import socket, sys
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind(("0.0.0.0", 5000))
print("listens", flush=True)
while (word := here.recv(100).decode().strip()) != "end":
    print(word, flush=True)
"""
SENDER = "import socket, sys; socket.create_connection(('host0', 5001)).sendall(bytes(int(sys.argv[1])))"
RECEIVER = """
import socket
with socket.create_server(("0.0.0.0", 5001)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    received = 0
    while block := connection.recv(1 << 20):
        received += len(block)
    print(received)
"""
MODEL = (
    "--cpu --fp64 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--make-vocab-size-divisible-by 8 --lr 1e-3 --global-batch-size 8 --train-iters 4 --log-interval 1 --eval-iters 0 "
    "--num-workers 0 --hidden-dropout 0.1"
).split()


def await_word(process: Process, word: str) -> None:
    limit = time.monotonic() + HANG
    while word not in process.screen.split():
        assert process.running and time.monotonic() < limit, process.screen
        time.sleep(0.02)


def send(box: Box, host: int, word: str) -> None:
    box.run(host, "bash", "-c", f"echo {word} >/dev/udp/{box.names[0]}/5000")


def send_until_heard(box: Box, host: int, word: str, listener: Process) -> None:
    """After a plug the kernel needs a moment to see the carrier."""
    limit = time.monotonic() + HANG
    while word not in listener.screen.split():
        assert listener.running and time.monotonic() < limit, listener.screen
        send(box, host, word)
        time.sleep(0.02)


def test_each_host_has_its_own(tmp_path: Path) -> None:
    disk, cores = tmp_path / "disk", os.sched_getaffinity(0)
    with hosts(2, cpus=[{min(cores)}, {max(cores)}], disk=disk) as box, hosts(1) as other:
        for host, core in enumerate((min(cores), max(cores))):
            assert box.run(host, "hostname").strip() == f"host{host}"
            assert f"{box.addresses[host]}/24" in box.run(host, "ip", "-brief", "address")
            assert box.run(host, "pwd").strip() == str(ROOT)
            assert box.run(host, "sh", "-c", "grep Cpus_allowed_list /proc/self/status").split()[1] == str(core)
            box.run(host, "sh", "-c", f'test -z "$(ls {disk})" && hostname >{disk}/name')
            assert (box.disk_of(host) / "name").read_text() == f"host{host}\n"
        assert box.run(0, "getent", "hosts", "host1").split() == ["10.77.0.2", "host1"]
        assert other.run(0, "hostname").strip() == "host0"
        with pytest.raises(RuntimeError, match=r"on host1 exits with 3:\nbad"):
            box.run(1, "sh", "-c", "echo bad; exit 3")
    assert not box.folder.exists()


def test_cables() -> None:
    with hosts(2) as box:
        listener = box.start(0, [sys.executable, "-c", LISTENER])
        await_word(listener, "listens")
        send_until_heard(box, 1, "whole", listener)
        box.pull_cable(1)
        limit = time.monotonic() + HANG
        while "NO-CARRIER" not in box.run(1, "ip", "link", "show", "eth0"):  # the kernel tells of it later
            assert time.monotonic() < limit
        box.plug(1)
        send_until_heard(box, 1, "plugged", listener)
        box.one_way(1, "out")
        send(box, 1, "lost")
        box.plug(1)
        send_until_heard(box, 1, "whole-again", listener)
        box.one_way(1, "in")
        send(box, 1, "heard")
        box.one_way(0, "out")  # what it sends, not what it hears
        send_until_heard(box, 1, "heard-too", listener)
        send(box, 1, "end")
        assert listener.wait() == 0
        heard = dict.fromkeys(listener.screen.split())
        assert list(heard) == ["listens", "whole", "plugged", "whole-again", "heard", "heard-too"]


def test_a_rate_limits_a_cable() -> None:
    with hosts(2, "20mbit") as box:
        receiver = box.start(0, [sys.executable, "-c", RECEIVER])
        await_word(receiver, "listens")
        box.run(1, sys.executable, "-c", SENDER, 300_000)
        assert receiver.wait() == 0 and receiver.screen.split() == ["listens", "300000"]
        shaped = box.run(1, "tc", "-s", "qdisc", "show", "dev", "eth0")
        assert "rate 20Mbit" in shaped and int(re.findall(r"overlimits (\d+)", shaped)[0]) > 10
        box.set_rate(1, "1gbit")
        assert "rate 1Gbit" in box.run(1, "tc", "qdisc", "show", "dev", "eth0")
        box.set_rate(1, None)
        assert "noqueue" in box.run(1, "tc", "qdisc", "show", "dev", "eth0")
    assert [bits_per_second(rate) for rate in ("1.5kbit", "2mbit", "1gbit")] == [1500, 2e6, 1e9]
    with pytest.raises(ValueError, match="rate fast is not of the form 100mbit"):
        bits_per_second("fast")


def test_power_and_signals() -> None:
    with hosts(2) as box:
        sleeper, asked = (box.start(host, ["sh", "-c", "echo sleeps; exec sleep 1000"]) for host in (1, 0))
        for process in (sleeper, asked):
            await_word(process, "sleeps")
        box.kill_host(1)
        assert sleeper.wait() == -signal.SIGKILL and box.running_hosts() == [0]
        asked.signal(signal.SIGTERM)
        assert asked.wait() == -signal.SIGTERM
        box.boot(1)
        assert "1 received" in box.run(1, "sh", "-c", "getent hosts host0 >&2; echo 1 received")


def _abandoned(said: mp.connection.Connection) -> None:
    with hosts(1) as box:
        box.start(0, ["sleep", "1000"])
        said.send((box._hosts[0].init, str(box.folder)))
        time.sleep(HANG)


def words_of(pid: int) -> bytes:
    """Command line of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_killed_box_leaves_nothing() -> None:
    receive, said = mp.Pipe(duplex=False)
    owner = mp.get_context("fork").Process(target=_abandoned, args=(said,))
    owner.start()
    init, folder = receive.recv()
    owner.kill()
    owner.join()
    limit = time.monotonic() + HANG
    while words_of(init):
        assert time.monotonic() < limit
        time.sleep(0.02)
    sweep()
    assert not Path(folder).exists()


def trained(folder: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of each step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["lm_loss"] for record in records], [record["grad_norm"] for record in records]


@pytest.mark.grid("start", ["forked"], ["forked", "torchrun"])
def test_training_on_two_hosts_equals_one_process(start: str, tmp_path: Path) -> None:
    flags = [*MODEL, "--tp", "2", "--pp", "2", "--save", str(tmp_path / "hosts")]
    with hosts(2, "100mbit") as box:
        if start == "forked":
            run_on_hosts(box, 2, flags, tmp_path)
        else:
            for launcher in box.torchrun(2, "pretrain_gpt.py", *flags, log=tmp_path):
                assert launcher.wait() == 0, launcher.screen
    run_forked(1, [*MODEL, "--save", str(tmp_path / "one")], tmp_path / "screen")
    alone, together = trained(tmp_path / "one"), trained(tmp_path / "hosts")
    assert len(alone[0]) == 4
    assert together[0] == pytest.approx(alone[0], rel=1e-9) and together[1] == pytest.approx(alone[1], rel=1e-9)
