"""Datagrams and connections from other programs must neither end nor delay a run, whatever arrives at its ports."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.extensions.operate.resilience.heartbeat import KINDS, check_beat, check_findings, seal, unseal
from megatron.extensions.operate.resilience.host_watch import PROGRAM, HostWatch
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.rank_status import RankStatus
from tests.forked import forked_ranks
from tests.limits import HANG, wait_for
from tests.tiny import TINY

TOKEN = "0123456789abcdef" * 2
DRAW = random.Random(47)
STRANGERS = [
    b"",
    b"0",
    b"null",
    b"\xff\xfe",
    b'{"run": 1}',
    b"9" * 5000,
    b"[" * 5000,
    b'{"a":' * 9000,
    *(DRAW.randbytes(DRAW.randrange(2000)) for _ in range(200)),
]
"""Datagrams without the run's token."""

VALUES: list[Any] = [None, True, -1, 7, 10**400, 1.5, float("nan"), float("inf"), "", "x", "\udcff", [], [[]], [1.5]]
VALUES += [{}, {"x": 1}, {"7": 1.0}, {"1": "1"}, {"1": float("inf")}, {"1": -float("inf")}, {"1": True}, {"²": 1.0}]
"""Invalid field values for messages whose token is valid. A value in this list may be valid for some fields, but no
field accepts all values."""

BEAT = {"from": 1, "ages": {"0": 0.1}, "end": ""}
FINDINGS = {kind: {} for kind in KINDS} | {"gone": [], "fine": [1]}


def with_token() -> list[bytes]:
    """Return datagrams that begin with the run's token but are not valid messages."""
    rest = [b"", b"{", b"3", b"[" * 5000, b'{"from":' * 7000, *STRANGERS]
    return [TOKEN.encode() + each for each in rest]


def changed(message: dict[str, Any], right: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield invalid variants of a message. In each variant, one field is missing or has a wrong value."""
    for field in message:
        yield {name: value for name, value in message.items() if name != field}
        for value in VALUES:
            if not any(type(value) is type(each) and value == each for each in right.get(field, ())):
                yield message | {field: value}


WRONG_BEATS = [*changed(BEAT, {"end": ("",), "ages": ({},)})]
WRONG_FINDINGS = [*changed(FINDINGS, dict.fromkeys(KINDS, ({},)) | {"gone": ([],), "fine": ([],)})]


def test_messages_are_distinguished_from_foreign_datagrams() -> None:
    check_beat(unseal(TOKEN, seal(TOKEN, BEAT)), 2)
    check_findings(unseal(TOKEN, seal(TOKEN, FINDINGS)), 2)
    for data in STRANGERS:
        for token in (TOKEN, ""):  # the token is empty until it is known, and then matches no datagram
            with pytest.raises(ValueError, match="does not begin with the token"):
                unseal(token, data)
    for data in with_token():
        with pytest.raises(ValueError):  # noqa: PT011 (of many kinds)
            check_beat(unseal(TOKEN, data), 2)
    for wrong in WRONG_BEATS:
        with pytest.raises(ValueError, match="wrong types"):
            check_beat(wrong, 2)
    for wrong in WRONG_FINDINGS:
        with pytest.raises(ValueError, match="wrong types"):
            check_findings(wrong, 2)


def attack(ports: list[int]) -> int:
    """Send all hostile datagrams to loopback ports, and return the number of datagrams."""
    data = [*STRANGERS, *with_token(), *(seal(TOKEN, wrong) for wrong in (*WRONG_BEATS, *WRONG_FINDINGS))]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for each in data:
            for port in ports:
                sender.sendto(each, ("127.0.0.1", port))
    return len(data)


@contextmanager
def heartbeat(peer: socket.socket, log: Path) -> Iterator[tuple[Any, int]]:
    """Start the heartbeat process of rank 0's host, and yield the process and its port. The heartbeat process treats
    the socket `peer` as the host of rank 1."""
    words = [os.getpid(), 0, 2, 6.0, int(socket.AF_INET)]
    command = [sys.executable, "-I", "-S", str(PROGRAM), *map(str, words)]
    pipe = subprocess.PIPE
    with log.open("w") as errors, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        hosts = {1: ["127.0.0.1", peer.getsockname()[1]]}
        process.stdin.write(json.dumps({"token": TOKEN, "ears": [], "hosts": hosts}).encode() + b"\n")
        process.stdin.flush()
        try:
            yield process, port
        finally:
            process.kill()


def test_a_heartbeat_ignores_and_reports_foreign_datagrams(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        peer.settimeout(HANG)
        with heartbeat(peer, tmp_path / "log") as (process, port):
            peer.recv(65536)  # the process now has the token
            count = attack([port])
            peer.sendto(seal(TOKEN, BEAT), ("127.0.0.1", port))
            while not unseal(TOKEN, peer.recv(65536))["ages"]:
                # wait until the process has received this valid message, which was sent after all hostile messages
                pass
            assert process.poll() is None
            process.stdin.close()
            assert process.wait(HANG) == 0
    first, last = (tmp_path / "log").read_text().splitlines()
    assert f"port {port}: ignored a UDP datagram from 127.0.0.1 port " in first
    assert "the datagram does not begin with the token of this run" in first
    assert int(last.split("ignored ")[1].split()[0]) <= count and "that were not heartbeats of this run" in last


def test_foreign_connections_do_not_block_a_heartbeat(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        with heartbeat(peer, tmp_path / "log") as (_, port):
            for _ in range(300):  # the kernel would not queue so many connections if the process did not accept them
                with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
                    assert connection.recv(1) == b""


def test_a_rank_ignores_foreign_datagrams(capsys: pytest.CaptureFixture[str]) -> None:
    ends: Any = SimpleNamespace(failed=[], gone=[])
    ends.fail, ends.report_gone = ends.failed.append, ends.gone.append
    board: Any = SimpleNamespace(store=None)
    watch = HostWatch(Launch(0, 2, several_hosts=True), RankStatus(), cast("Any", ends), board, 6.0)
    watch._token = TOKEN
    watch._ear.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=watch._listen, daemon=True)
    thread.start()
    attack([port := watch._ear.getsockname()[1]])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as host:
        wait_for(lambda: host.sendto(seal(TOKEN, FINDINGS | {"gone": [1]}), ("127.0.0.1", port)) and ends.gone)
        watch._closed.set()
        host.sendto(b"", ("127.0.0.1", port))
    thread.join()
    assert ends.failed == [] and set(ends.gone) == {1}
    said = capsys.readouterr().err
    assert said.count("rank 0 of 2 on ") == 1 and said.count("ignored a UDP datagram from 127.0.0.1 port ") == 1


def udp_ports() -> list[int]:
    """Return all open UDP ports of this machine, which any user can list."""
    lines = [line for name in ("udp", "udp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [int(line.split()[1].rpartition(":")[2], 16) for line in lines]


def test_another_user_cannot_end_a_run_on_two_hosts(tmp_path: Path) -> None:
    def start_host(rank: int) -> None:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def as_nobody() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)

    flags = [*TINY.split(), "--train-iters", "100000", "--log-interval", "20", "--save", str(tmp_path / "save")]
    before, screen = set(udp_ports()), tmp_path / "screen"
    with forked_ranks(2, flags, screen, start_host) as ranks:
        wait_for(lambda: " iteration " in screen.read_text(), ranks, screen.read_text)
        ports = set(udp_ports()) - before
        assert len(ports) >= 4  # each rank has a heartbeat port and a listener port
        if not (child := os.fork()):
            as_nobody()
            attack([*ports])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        wait_for(lambda: screen.read_text().count("ignored a UDP datagram") >= 4, ranks, screen.read_text)
        steps = screen.read_text().count(" iteration ")
        wait_for(lambda: screen.read_text().count(" iteration ") > steps + 1, ranks, screen.read_text)
        (tmp_path / "save" / "exit").touch()
        for rank in ranks:
            rank.join(HANG)
        assert [rank.exitcode for rank in ranks] == [0, 0], screen.read_text()
