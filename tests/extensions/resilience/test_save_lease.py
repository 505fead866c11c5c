"""The lease on a --save folder: held by one run, free when that has ended, was killed, or does not renew it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from megatron.extensions.resilience import save_folder
from megatron.extensions.resilience.save_folder import LeaseError, SaveLease
from tests.faults.runs import MODEL
from tests.forked import forked_ranks, run_forked
from tests.limits import HANG, wait_for


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_folder, "RENEWAL", 0.02)
    monkeypatch.setattr(save_folder, "STALE", 1.0)


def of_another_machine(folder: Path) -> None:
    """The file then looks like that of a process on a machine that this one cannot look into."""
    file = folder / ".lease"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"namespace": "elsewhere", "host": "far"}))


def never(error: LeaseError) -> None:
    raise AssertionError(error)


def test_a_lease_that_is_renewed_is_refused_until_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_folder, "STALE", HANG)
    first, second = SaveLease(tmp_path, never), SaveLease(tmp_path, never)
    first.acquire()
    named = rf"another run saves to {tmp_path}: its rank 0 is process {os.getpid()} on \S+, started 2\d{{3}}-"
    with pytest.raises(LeaseError, match=named):
        second.acquire()
    first.release()
    assert not (tmp_path / ".lease").exists()
    second.acquire()
    second.release()


def test_a_lease_that_is_given_back_as_it_is_renewed_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_folder, "DISK", HANG)
    lease, begun = SaveLease(tmp_path, never), threading.Event()
    lease.acquire()
    write = lease._write

    def slow() -> None:
        begun.set()
        lease._closed.wait(HANG)
        time.sleep(0.3)
        write()

    monkeypatch.setattr(lease, "_write", slow)
    assert begun.wait(HANG)
    lease.release()
    for thread in threading.enumerate():
        if thread.name == "save lease":
            thread.join(HANG)
    assert list(tmp_path.iterdir()) == []


def test_a_lease_of_a_killed_process_is_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_folder, "STALE", 1e6)
    if not (child := os.fork()):
        SaveLease(tmp_path, never).acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert (tmp_path / ".lease").exists()
    lease = SaveLease(tmp_path, never)
    lease.acquire()
    lease.release()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_lease_of_a_process_of_this_machine_is_free_if_that_is_stopped(tmp_path: Path, stopped: bool) -> None:
    """One that lives trains, though its disk may hold up the renewals."""
    if not (child := os.fork()):
        SaveLease(tmp_path, never)._write()
        os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()
    try:
        os.waitpid(child, os.WUNTRACED)
        if not stopped:
            os.kill(child, signal.SIGCONT)
            os.waitpid(child, os.WCONTINUED)
        lease = SaveLease(tmp_path, never)
        with nullcontext() if stopped else pytest.raises(LeaseError, match=f"process {child} "):
            lease.acquire()
        lease.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_of_two_over_a_dead_lease_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SaveLease(tmp_path, never), SaveLease(tmp_path, never)

    @contextmanager
    def late(folder: Path) -> Iterator[None]:
        monkeypatch.undo()
        first.acquire()
        yield

    monkeypatch.setattr(save_folder, "folder_lock", late)
    with pytest.raises(LeaseError, match="another run saves to"):
        second.acquire()
    first.release()


def test_a_lease_that_nobody_renews_is_taken_over_and_its_holder_hears_of_it(tmp_path: Path) -> None:
    errors: list[LeaseError] = []
    asleep = SaveLease(tmp_path, errors.append)
    asleep._write()
    of_another_machine(tmp_path)
    lease = SaveLease(tmp_path, never)
    lease.acquire()
    asleep._renew()
    assert len(errors) == 1 and "has taken over: this run stood still" in str(errors[0])
    lease.release()
    asleep.release()
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_on_this_machine_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = [*MODEL, "--pp", "1", "--save", str(save), "--load", str(save)]
    with forked_ranks(2, [*flags, "--save-interval", "2"], tmp_path / "first") as first:
        wait_for((save / "latest_checkpointed_iteration.txt").exists, first, (tmp_path / "first").read_text)
        text = run_forked(4, [*flags, "--train-iters", "2"], tmp_path / "second", code=1)
        assert text.count(f"another run saves to {save}: its rank 0 is process {first[0].pid} on ") == 1, text
        assert all(rank.is_alive() for rank in first) and '"end"' not in (save / "run_events.jsonl").read_text()
        assert sorted(file.name for file in (save / "stacks").iterdir()) == ["rank-00000.txt", "rank-00001.txt"]
    assert (save / ".lease").exists()
    text = run_forked(2, [*flags, "--train-iters", "1"], tmp_path / "again")
    assert "loaded checkpoint of iteration " in text and not (save / ".lease").exists()
