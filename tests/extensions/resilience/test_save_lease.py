"""Tests of the lease on a --save folder. Only one run at a time holds the lease. The lease becomes free when the run
ends, is killed, or does not renew the lease."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePath
from typing import ClassVar

import pytest

from megatron.core.dist_checkpointing.file_storage import STORAGES, Storage, located
from megatron.core.dist_checkpointing.path_kind import LEASE, read_latest
from megatron.extensions.operate.resilience import save_lease
from megatron.extensions.operate.resilience.save_lease import LeaseError, LostLeaseError, SaveLease, StoredLease
from tests.apart import read_records
from tests.faults.runs import MODEL
from tests.forked import forked_ranks, run_forked
from tests.limits import HANG, wait_for
from tests.tiny import TINY


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lease, "RENEWAL", 0.02)
    monkeypatch.setattr(save_lease, "STALE", 1.0)


def of_another_machine(folder: Path) -> None:
    """Edit the lease file as if a process on a different machine held the lease. This machine cannot check whether such
    a process is alive."""
    file = folder / ".lease"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"namespace": "elsewhere", "host": "far"}))


def never(error: LeaseError) -> None:
    raise AssertionError(error)


def test_a_lease_that_is_renewed_is_refused_until_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lease, "STALE", HANG)
    first, second = SaveLease(tmp_path, never), SaveLease(tmp_path, never)
    first.acquire()
    named = rf"another run saves to {tmp_path}: its rank 0 is process {os.getpid()} on \S+, started 2\d{{3}}-"
    with pytest.raises(LeaseError, match=named):
        second.acquire()
    first.release()
    assert not (tmp_path / ".lease").exists()
    second.acquire()
    second.release()


def test_a_lease_released_during_a_renewal_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lease, "DISK", HANG)
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
    monkeypatch.setattr(save_lease, "STALE", 1e6)
    if not (child := os.fork()):
        SaveLease(tmp_path, never).acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert (tmp_path / ".lease").exists()
    lease = SaveLease(tmp_path, never)
    lease.acquire()
    lease.release()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_lease_of_a_stopped_process_on_this_machine_is_free(tmp_path: Path, stopped: bool) -> None:
    """A live process keeps its lease, even if the disk delays renewals. A stopped process does not keep its lease."""
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


def test_only_one_of_two_runs_takes_over_a_dead_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SaveLease(tmp_path, never), SaveLease(tmp_path, never)

    @contextmanager
    def late(folder: Path) -> Iterator[None]:
        monkeypatch.undo()
        first.acquire()
        yield

    monkeypatch.setattr(save_lease, "folder_lock", late)
    with pytest.raises(LeaseError, match="another run saves to"):
        second.acquire()
    first.release()


def test_an_unrenewed_lease_is_taken_over_and_its_holder_is_told(tmp_path: Path) -> None:
    errors: list[LeaseError] = []
    asleep = SaveLease(tmp_path, errors.append)
    asleep._write()
    of_another_machine(tmp_path)
    lease = SaveLease(tmp_path, never)
    lease.acquire()
    asleep._renew()
    assert len(errors) == 1 and "has taken over while this run was suspended" in str(errors[0])
    lease.release()
    asleep.release()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def held(tmp_path: Path) -> tuple[SaveLease, Path, list[LeaseError]]:
    """Return a lease that is renewed only by calls to `check`, the lease's folder, and a list to which the lease
    appends an error when the lease is lost."""
    folder, errors = tmp_path / "save", list[LeaseError]()
    lease = SaveLease(folder, errors.append)
    lease.acquire()
    lease._closed.set()
    for thread in threading.enumerate():
        if thread.name == "save lease":
            thread.join(HANG)
    return lease, folder, errors


Held = tuple[SaveLease, Path, list[LeaseError]]


def test_a_deleted_lease_is_lost(held: Held) -> None:
    """The lease file is missing, as if another run had taken the lease, finished, and released the lease."""
    lease, folder, errors = held
    lease.check()
    (folder / ".lease").unlink()
    with pytest.raises(LeaseError, match=r"the lease of this run, .*, is gone: another run has taken over"):
        lease.check()
    assert len(errors) == 1 and "resumes from the latest checkpoint" in errors[0].advice
    assert not (folder / ".lease").exists()


def test_a_damaged_lease_is_written_again(held: Held) -> None:
    lease, folder, _ = held
    (folder / ".lease").write_text("{")
    lease.check()
    assert json.loads((folder / ".lease").read_text())["token"] == lease._owner["token"]


@pytest.mark.parametrize("fate", ["deleted", "renamed"])
def test_a_missing_folder_is_reported_once_and_leased_again(
    fate: str, held: Held, capsys: pytest.CaptureFixture[str]
) -> None:
    lease, folder, errors = held
    if fate == "deleted":
        shutil.rmtree(folder)
    else:
        folder.rename(folder.with_name("elsewhere"))
    for _ in range(2):
        lease.check()
    assert capsys.readouterr().err.count(f"--save {folder} is gone: it was deleted, renamed or unmounted") == 1
    folder.mkdir()
    lease.check()
    assert capsys.readouterr().err == f"--save {folder} is available again\n"
    assert json.loads((folder / ".lease").read_text())["token"] == lease._owner["token"] and not errors


def test_a_lease_deleted_first_with_its_folder_is_not_lost(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rm -r` takes a while and may delete the lease before other files."""
    lease, folder, errors = held
    (folder / "iter_0000001").mkdir()
    (folder / ".lease").unlink()
    entries = save_lease._entries

    def deleting(path: Path) -> set[str]:
        found = entries(path)
        shutil.rmtree(path, ignore_errors=True)
        return found

    monkeypatch.setattr(save_lease, "_entries", deleting)
    lease.check()
    assert not errors and not folder.exists()


def test_a_folder_on_another_file_system_gets_no_checkpoint(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    """The test simulates that the disk of the folder was unmounted. Saves would then fill the disk that contains the
    mount point."""
    lease, folder, errors = held
    assert lease._place is not None
    lease._place.file_system += 1
    lease.check()  # a remounted disk is accepted because it contains the lease
    shutil.rmtree(folder)
    for _ in range(2):
        with pytest.raises(OSError, match="is on a different file system than at the start: mount its disk again"):
            lease.check()
    assert capsys.readouterr().err.count("its disk was unmounted") == 1 and not errors


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


DELETES = """
import shutil
from pathlib import Path
from megatron.training.extensions import CALLBACKS
from megatron.training.hooks import Callback

@CALLBACKS.register("deletes")
class Deletes(Callback):
    def on_step_end(self, run):
        if run.progress.iteration == 3:
            path = Path(run.config.checkpoint.save)
            {what}
"""


def run_that_deletes(what: str, tmp_path: Path, code: int) -> str:
    """Train for six iterations, with a checkpoint every two iterations. In the third iteration, execute the code
    `what`, in which `path` is the --save folder."""
    (tmp_path / "deletes.py").write_text(DELETES.format(what=what))
    flags = f"{TINY} --train-iters 6 --log-interval 1 --save {tmp_path / 'save'} --save-interval 2 --no-async-save"
    return run_forked(1, [*flags.split(), "--extension", str(tmp_path / "deletes.py")], tmp_path / "screen", code)


def test_a_run_whose_folder_is_deleted_saves_everything_again(tmp_path: Path) -> None:
    # The folder is renamed before it is deleted. A rename is atomic, so the run never sees a folder without the lease.
    save, text = tmp_path / "save", run_that_deletes("shutil.rmtree(path.rename(path.with_name('gone')))", tmp_path, 0)
    assert text.count(f"--save {save} is gone") == 1 and "cannot write metrics to" in text
    assert read_latest(save) == 6 and [record["iteration"] for record in read_records(save / "metrics.jsonl")] == [
        *range(3, 7)
    ]
    assert (save / "run_config.yaml").is_file() and not (save / ".lease").exists()


def test_a_run_whose_lease_is_gone_ends_before_it_saves(tmp_path: Path) -> None:
    text = run_that_deletes("(path / '.lease').unlink()", tmp_path, 1)
    assert "is gone: another run has taken over while this one was suspended" in text and "Traceback" not in text
    assert read_latest(tmp_path / "save") == 2


class Objects(Storage):
    """Storage in memory. `before` contains functions that the next call to `replace` runs first. These functions
    simulate the actions of another run."""

    content_of: ClassVar[dict[str, bytes]] = {}
    before: ClassVar[list[Callable[[], None]]] = []

    def names(self, folder: PurePath) -> list[str]:
        return []

    def size(self, path: PurePath) -> int | None:
        return len(self.content_of[str(path)]) if str(path) in self.content_of else None

    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        if str(path) not in self.content_of:
            raise FileNotFoundError(str(path))
        return self.content_of[str(path)]

    def write(self, path: PurePath, data: bytes) -> None:
        self.content_of[str(path)] = data

    def remove(self, path: PurePath) -> None:
        del self.content_of[str(path)]

    def replace(self, path: PurePath, data: bytes, expected: bytes | None) -> None:
        while self.before:
            self.before.pop()()
        super().replace(path, data, expected)


STORAGES.register("leased", Objects)
URL = located("leased://bucket/run")


def test_only_one_of_two_runs_holds_a_lease_in_object_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objects, "content_of", {})
    errors = list[LeaseError]()
    first, second = StoredLease(URL, errors.append), StoredLease(URL, never)
    Objects.before.append(second.acquire)
    with pytest.raises(LeaseError, match="another run saves to leased://bucket/run: its rank 0 is process"):
        first.acquire()
    with pytest.raises(LeaseError, match="another run saves to"):
        StoredLease(URL, never).acquire()
    second.check()
    second.release()
    assert not Objects.content_of
    first.acquire()
    first.check()
    first._closed.set()  # ends the thread that renews the lease
    time.sleep(0.1)
    Objects.content_of[str(URL / LEASE)] = first._next().replace(first._owner["token"].encode(), b"other")
    with pytest.raises(LeaseError, match="and has taken over while this run was suspended"):
        first.check()
    del Objects.content_of[str(URL / LEASE)]
    with pytest.raises(LostLeaseError, match=r"leased://bucket/run/\.lease, is gone"):
        first.check()
    assert errors


def test_a_renewal_whose_answer_was_lost_keeps_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objects, "content_of", {})
    lease = StoredLease(URL, never)
    lease.acquire()
    Objects.content_of[str(URL / LEASE)] = lease._next()
    lease.check()
    lease.release()
    assert not Objects.content_of
