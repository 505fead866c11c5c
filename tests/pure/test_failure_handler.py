"""Test that a failed process exits even if a step of its shutdown hangs or fails. The tests also check the advice in
the failure report."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.path_kind import LATEST, PATH_KINDS
from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.training.config.run_config import CheckpointConfig
from megatron.training.extensions import load_extensions
from megatron.training.reliability import failure_handler
from megatron.training.reliability.child_processes import end_children, end_daemons
from megatron.training.reliability.failure_handler import FailureHandler
from megatron.training.reliability.failure_report import ADVICE, TOO_MANY, Failure, died, is_consequence, start_again
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.rank_status import RankStatus
from megatron.training.reliability.rank_store import out_of_memory_kills
from megatron.training.reliability.run_status import ExitCode, Outcome
from megatron.training.reliability.stack_dump import StackDump
from megatron.training.reliability.stop_requests import SignalListener
from tests.forked import join
from tests.limits import HANG

FAILURE = Failure(1, "rank 1 of 2", "step 3", "an error", "its traceback", "correct it")


class NoBoard:
    """Replacement for a `Board` whose store is unavailable. Each request calls `answer` and does nothing else."""

    def __init__(self, answer: Callable[[], object]) -> None:
        self._answer, self.peers = answer, dict[int, Any]()

    def name(self, rank: int) -> str:
        return f"rank {rank} of 2"

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *args: self._answer()


def hang() -> None:
    threading.Event().wait()


def gone() -> None:
    raise RuntimeError("the store is gone")


def ended(folder: Path, answer: Callable[[], object], end: Callable[[FailureHandler], object]) -> str:
    """Call `end` in a process whose store is unavailable, assert that the process exits with code 1, and return the
    output of the process."""

    def run() -> None:
        os.dup2(os.open(folder / "screen", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        handler = FailureHandler(Launch(0, 2), RankStatus(), StackDump(), SignalListener(), Outcome(None))
        handler.at_exit += [hang, (folder / "closed").touch]
        handler.connect(NoBoard(answer))  # type: ignore[arg-type]
        end(handler)

    process: Any = mp.get_context("fork").Process(target=run)
    process.start()
    assert join([process]) == [1]
    return (folder / "screen").read_text()


@pytest.mark.parametrize(
    "end",
    [
        lambda handler: handler.fail(RuntimeError("connection closed by peer")),
        lambda handler: handler.report_gone(1),
        lambda handler: handler.follow(FAILURE),
    ],
    ids=["fail", "report_gone", "follow"],
)
def test_a_hanging_store_delays_no_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    monkeypatch.setattr(failure_handler, "LAST_RESORT", 0.05)
    monkeypatch.setattr(failure_handler, "PARTING", HANG)
    assert "most recent call first" in ended(tmp_path, hang, end)


def test_a_second_thread_ends_a_hanging_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_handler, "PARTING", 0.1)
    monkeypatch.setattr(failure_handler, "GATHER", 0.1)

    def end(handler: FailureHandler) -> None:
        threading.Thread(target=handler.follow, args=(FAILURE,), daemon=True).start()
        while not handler.ending:
            pass
        handler.unreachable(FAILURE, [1])

    assert ended(tmp_path, hang, end).count("RUN FAILED: rank 1 of 2\n") == 1
    # The second shutdown function was called even though the first function hangs.
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("what", ["a report", "an error in it"])
def test_a_process_exits_even_if_its_report_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def broken(stacks: StackDump, rank: int) -> str:
        raise OSError("the disk is away")

    if what != "a report":
        monkeypatch.setattr(StackDump, "last_words", broken)
    said = ended(tmp_path, gone, lambda handler: handler.report_gone(1))
    assert ("OSError: the disk is away" if what != "a report" else "RUN FAILED: rank 1 of 2\n") in said


def advice(call: Callable[[], object], **checkpoints: Any) -> str:
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        call()
    return Failure.of(raised.value, 0, "rank 0 of 2", "step 3", CheckpointConfig(**checkpoints)).advice


def fails(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


def test_advice_follows_the_cause(tmp_path: Path) -> None:
    (tmp_path / "own_bug.py").write_text("def bug():\n    {}['absent']\n")
    load_extensions([str(tmp_path / "own_bug.py")])
    assert advice(lambda: load_extensions(["absent.py"])) == ""  # user errors are printed without advice
    assert advice(fails(MemoryError())) == ADVICE["memory"]
    assert advice(fails(RuntimeError("connection closed by peer"))) == ADVICE["collective"]
    assert advice(sys.modules["extension_own_bug"].bug).startswith(
        f"correct the error at {tmp_path / 'own_bug.py'}:2, in the extension, and start the same command again: "
    )


@pytest.mark.usefixtures("forget_extensions_at_once")
def test_advice_names_the_checkpoint_that_the_same_command_loads(tmp_path: Path) -> None:
    run, again = str(tmp_path), "correct the error and start the same command again"
    error = fails(KeyError("x"))
    assert advice(error, save=run, load=run) == f"{again}: it begins where this run began, as there is no checkpoint"
    (tmp_path / LATEST).write_text("2\n")
    there = "it resumes from the latest checkpoint"
    assert advice(error, save=run, load=run) == f"{again}: {there} in --load {run}"
    assert advice(error, save=run) == f"{again} with --load {run}: {there} there"
    killed = died(CheckpointConfig(save=run, load=run))
    memory = died(CheckpointConfig(save=run, load=run), memory="within 10 minutes: it resumes from copies")
    assert memory.endswith("then start the same command again within 10 minutes: it resumes from copies")
    assert killed.endswith(f"then start the same command again: {there} in --load {run}")
    assert advice(error, save=run, load=run, finetune=True).startswith(f"{again} with --load {run} and without --fine")
    away = str(tmp_path / "away")  # the run has saved to this folder, but the folder is now missing
    mount = f"mount or restore --save {away}, where this run saved iteration 5; then start the same command again"
    assert start_again(CheckpointConfig(save=away, load=away), saved=5) == mount
    assert start_again(CheckpointConfig(save=away), saved=5) == f"{mount} with --load {away}"
    PATH_KINDS.register("theirs", lambda path: path.endswith(".theirs"), about="", order=25, loaded_as="theirs")
    assert advice(error, save=run, load=f"{run}/a.theirs") == f"{again}: {there} in --save {run}"


def test_an_out_of_memory_kill_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = StackDump()
    assert "killer" not in stacks.last_words(1)
    module = "megatron.training.reliability.stack_dump"
    monkeypatch.setattr(f"{module}.out_of_memory_kills", lambda: out_of_memory_kills() + 2)
    assert "the kernel's out-of-memory killer has ended 2 processes of this machine" in stacks.last_words(1)


def of_disk() -> Iterator[tuple[BaseException, bool]]:
    """Yield pairs of an error and a boolean. The boolean is True if the error is reported in one sentence, without a
    traceback."""
    full = OSError(errno.ENOSPC, "No space left on device", "/data/cache/a.npy")
    yield CheckpointError("checkpoint of iteration 4 was not saved"), True
    yield full, True
    yield OSError(errno.ENOSPC, "No space left on device"), False
    broken = CheckpointError("cannot write checkpoint")
    broken.__cause__ = TypeError("an error of ours")
    yield broken, False


@pytest.mark.parametrize(("error", "told"), of_disk())
def test_a_full_disk_is_reported_in_one_sentence(error: BaseException, told: bool) -> None:
    failure = Failure.of(error, 0, "rank 0", "saving", CheckpointConfig())
    assert str(error) in failure.what and ("free space on the disk" in failure.advice) == told
    assert failure.text().count("not saved") <= 1


@contextmanager
def no_more_files() -> Iterator[int]:
    """Context manager that prevents this process from opening more files, and yields the limit on open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        with suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in held:
            os.close(each)


def test_a_limit_of_open_files_is_named_as_the_cause(tmp_path: Path) -> None:
    """The failure report names the cause, no matter whether the error was raised by Python, by a library, or by this
    program as a consequence."""
    options, stacks = CheckpointConfig(save=str(tmp_path)), StackDump()
    stacks.open(tmp_path / "stacks", 0)
    errors: list[BaseException] = []
    with no_more_files() as limit:
        with pytest.raises(ValueError, match="name a folder that every rank can write") as refused:
            StackDump().open(tmp_path / "stacks", 1)
        errors.append(refused.value)
        with pytest.raises(OSError, match="Too many open files") as unread:
            (tmp_path / "stacks" / "rank-00000.txt").read_text()
        errors += [unread.value, RuntimeError("[enforce fail at gloo/transport/tcp/socket.cc:24] socket: " + TOO_MANY)]
        reports = [Failure.of(error, 0, "rank 0 of 2", "start", options) for error in errors]
        hidden = Failure.of(RuntimeError("Cannot resolve 127.0.0.1"), 0, "rank 0 of 2", "start", options).advice
        advised = [died(options), hidden, stacks.last_words(0)]
    for error, report in zip(errors, reports, strict=True):
        assert not is_consequence(error) and report.code == ExitCode.FAILED
        assert f"open-file limit, which is {limit} here, with `ulimit -n " in report.advice
    assert [f"open files, and the limit is {limit}, which may be the cause" in text for text in advised] == [1, 1, 0]
    assert "files open" not in died(options)


def test_the_end_of_a_run_kills_a_daemon_that_ignores_sigterm(capfd: pytest.CaptureFixture[str]) -> None:
    """If the daemon were not killed, Python would wait for it forever. A forked process does not end the daemons of its
    parent."""

    def run() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process inherits the handler of an earlier test
        fork = mp.get_context("fork")
        deaf = fork.Event()

        def stay() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            deaf.set()
            time.sleep(600)

        willing = fork.Process(target=time.sleep, args=(600,), daemon=True)
        willing.start()
        end_daemons(grace=600)
        assert willing.exitcode == -signal.SIGTERM
        stubborn = fork.Process(target=stay, daemon=True)
        stubborn.start()
        deaf.wait()
        if (pid := os.fork()) == 0:
            end_daemons(grace=0.2)
            os._exit(0)
        os.waitpid(pid, 0)
        assert stubborn.is_alive()
        end_daemons(grace=0.2)
        assert stubborn.exitcode == -signal.SIGKILL

    process = mp.get_context("fork").Process(target=run)
    process.start()
    assert join([process]) == [0]
    said = capfd.readouterr().err
    assert said.count("a daemonic child, ignored SIGTERM for 0.2 s: killed") == 1, said


def test_children_of_a_failed_process_are_killed(tmp_path: Path) -> None:
    """A child that ignores SIGTERM is killed, but a child with its own session is not."""

    def run() -> None:
        stubborn = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
        )
        child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        others = [subprocess.Popen(["sleep", "600"], start_new_session=apart) for apart in (False, True)]
        (tmp_path / "pids").write_text(" ".join(str(process.pid) for process in (child, *others)))
        end_children()
        os._exit(0)

    process = mp.get_context("fork").Process(target=run)
    process.start()
    assert join([process]) == [0]
    *ended, stays = (Path(f"/proc/{pid}/stat") for pid in (tmp_path / "pids").read_text().split())
    try:
        assert all(not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX" for stat in ended)
        assert stays.exists()
    finally:
        os.kill(int(stays.parent.name), signal.SIGKILL)
