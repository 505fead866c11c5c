"""Tests in which some ranks do not reach a startup phase or a step in time. The error must name these ranks, the phase,
and the flag with the time limit."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from megatron.training.reliability.store_port import ForeignPortError, describe_port, leave_failure, left_failure
from tests.faults.broken_pretrain import slow_down
from tests.faults.runs import MODEL
from tests.forked import forked_ranks, join
from tests.limits import HANG, wait_for

LIMIT = "0.15"
"""Time limit in minutes. The limit is much longer than the delays between ranks on a busy machine."""

FLAGS = [*MODEL, "--pp", "1", "--startup-timeout-minutes", LIMIT]


def end_of_run(folder: Path, late: int, slow: str) -> str:
    """Delay rank `late`, wait until the other rank has exited with an error, and return the output."""

    def prepare(rank: int) -> None:
        if rank == late:
            time.sleep(HANG) if slow == "sleep" else slow_down(slow)

    with forked_ranks(2, FLAGS, folder / "screen", prepare) as ranks:
        assert join([ranks[1 - late]]) == [1]
    return (folder / "screen").read_text()


@pytest.mark.parametrize(("slow", "phase"), [("sleep", "start of the ranks"), ("data", "data")])
def test_a_rank_that_is_late_at_start_up_is_named(tmp_path: Path, slow: str, phase: str) -> None:
    text = end_of_run(tmp_path, late=1, slow=slow)
    assert text.count("RUN FAILED") == 1, text
    assert f"did not complete {phase} within --startup-timeout-minutes {LIMIT}: 1" in text
    if slow == "sleep":
        assert "RUN FAILED: rank 1 of 2\n" in text and "rank 1 has not come\nnoticed by rank 0 in " in text, text
    if slow == "data":  # the slow rank is alive and reports its current phase
        assert re.search(r"RUN FAILED: rank 1 of 2 on \S+\nphase: data\n", text), text


def test_a_rank_with_another_world_size_is_named(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        os.environ["WORLD_SIZE"] = str(2 + rank)

    flags = [*MODEL, "--tp", "1", "--pp", "1", "--global-batch-size", "12"]
    with forked_ranks(2, flags, tmp_path / "screen", prepare) as ranks:
        assert join(ranks) == [2, 2]
    text = (tmp_path / "screen").read_text()
    assert re.search(r"rank (0|1) was started as one of \d ranks, but the first rank to connect as one of", text), text


def test_another_program_at_the_port_is_reported_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def prepare(rank: int) -> None:
            os.environ["MASTER_PORT"] = str(other.getsockname()[1])
            os.environ["OUTCOME_FILE"] = str(tmp_path / "outcome")
            if rank == 1:
                (tmp_path / "started").touch()
            else:  # rank 0 waits here, because it could otherwise fail before rank 1 exists
                wait_for((tmp_path / "started").exists)

        flags = [*MODEL, "--pp", "1", "--startup-timeout-minutes", "30"]
        with forked_ranks(2, flags, tmp_path / "screen", prepare) as ranks:
            assert join(ranks) == [1, 1]
    text = (tmp_path / "screen").read_text()
    assert "rank 0 cannot open the store of the ranks at 127.0.0.1:" in text
    outcome = (tmp_path / "outcome").read_text()
    assert outcome.startswith("name=FAILED\nwhy=rank 0 of 2 on ") and "EADDRINUSE" in outcome
    found = re.search(r"rank 1 did not find the store of the ranks at 127.0.0.1:\d+: rank 0 cannot open it: (.*)", text)
    assert found is not None and "EADDRINUSE" in found[1], text
    assert "Traceback" not in text and "frame #" not in text
    assert "waited for --startup-timeout-minutes" not in text


def test_another_program_at_the_port_of_another_host_is_reported_in_time(tmp_path: Path) -> None:
    """If the other ranks cannot detect the failure of rank 0, the time limit ends their wait."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def prepare(rank: int) -> None:
            os.environ["MASTER_PORT"] = str(other.getsockname()[1])
            if rank == 0:
                time.sleep(HANG)

        flags = [*MODEL, "--pp", "1", "--startup-timeout-minutes", "0.02"]
        with forked_ranks(2, flags, tmp_path / "screen", prepare) as ranks:
            assert join([ranks[1]], 60) == [1]
    text = (tmp_path / "screen").read_text()
    assert "the program at the port does not answer like a store" in text and "Traceback" not in text
    assert text.count("waited for --startup-timeout-minutes") == 1, text


def test_the_program_at_the_port_of_the_store_is_described() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert describe_port("127.0.0.1", port) == "a program listens there, but it has not answered like a store yet"
        greeter = threading.Thread(target=lambda: [server.accept()[0].sendall(b"SSH-2.0-x\r\n") for _ in range(2)])
        greeter.start()  # accepts two connections, because the previous call has already connected
        with pytest.raises(ForeignPortError, match=r"another program uses the port: it sends b'SSH-2\.0"):
            describe_port("127.0.0.1", port)
        greeter.join()
    assert describe_port("127.0.0.1", port).startswith("nothing listens there yet")
    assert describe_port("no.such.host.invalid", port).startswith("it cannot be reached (")


def test_only_a_failure_of_this_start_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process reads only failures that were recorded since it started. Failures of earlier starts or of other
    launchers are ignored. Files of other programs are also ignored."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert left_failure("host", 1) is None
    leave_failure("host", 1, "taken")
    assert left_failure("host", 1) == "taken" and left_failure("host", 2) is None
    (file,) = tmp_path.glob("*/*.json")
    left = json.loads(file.read_text())
    for change in ({"at": 1.0}, {"parent": 1}, {"why": 3}, {"at": None}):
        file.write_text(json.dumps(left | change))
        assert left_failure("host", 1) is None
    for text in ("", "[1]", "[" * 100_000):
        file.write_text(text)
        assert left_failure("host", 1) is None
    file.unlink()
    (tmp_path / "other").write_text(json.dumps(left))
    file.symlink_to(tmp_path / "other")
    assert left_failure("host", 1) is None


def test_a_missing_store_is_reported(tmp_path: Path) -> None:
    text = end_of_run(tmp_path, late=0, slow="sleep")
    assert re.search(r"RUN FAILED: rank 1 of 2 on \S+\nphase: start-up\nrank 1 did not find the store", text), text
    assert f"waited for --startup-timeout-minutes {LIMIT}" in text and "Traceback" not in text


def test_a_rank_that_is_stopped_at_start_up_is_named(tmp_path: Path) -> None:
    def stop_in_data(rank: int) -> None:
        if rank == 1:
            slow_down("data")

    with forked_ranks(2, FLAGS, tmp_path / "screen", stop_in_data) as ranks:
        wait_for(lambda: "building data" in (tmp_path / "screen").read_text(), ranks)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        assert join([ranks[0]]) == [1]
    text = (tmp_path / "screen").read_text()
    assert re.search(r"RUN FAILED: rank 1 of 2 on \S+\n", text) and f"process {ranks[1].pid} is stopped" in text, text


def test_the_death_of_the_rank_that_holds_the_store_is_reported(tmp_path: Path) -> None:
    """Without torchrun, the rendezvous store runs in the process of rank 0."""
    screen = tmp_path / "screen"
    flags = [*MODEL, "--pp", "1", "--log-interval", "1"]
    with forked_ranks(2, flags, screen) as ranks:
        wait_for(lambda: re.search(r" iteration +[5-9]/", screen.read_text()) is not None, ranks)
        os.kill(ranks[0].pid, signal.SIGKILL)
        assert join([ranks[1]]) == [1]
    text = screen.read_text()
    assert re.search(r"RUN FAILED: rank 0 of 2 on \S+\nphase: step \d+.*, at its last sign of life\nprocess", text), (
        text
    )
    assert f"process {ranks[0].pid} is gone, and with it the ranks' store" in text
    assert "what to do: a crash or an external kill" in text and "--distributed-timeout-minutes" not in text
