"""Tests of restarts of ranks within the job. The tests cover which exits cause a restart, how often ranks are
restarted, and that all ranks are restarted together."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.extensions.operate.job_restarts import forking, parents, restarts, signals
from megatron.extensions.operate.job_restarts.parents import Parents
from megatron.extensions.operate.job_restarts.store_process import StoreProcess
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.child_processes import process_state
from megatron.training.reliability.launch import BEGAN, START, Launch
from tests.extensions.peer_copies.runs import Planned, Run, lost_little
from tests.forked import PORTS, join
from tests.limits import HANG, wait_for
from tests.tiny import TINY

SHARDED = ["--bf16", "--data-parallel-sharding-strategy", "optim"]

Attempt = Callable[[int, int], int]
"""Function that returns the exit code of a rank, given the rank and the number of the start."""


def config(limit: int = 2) -> RunConfig:
    return parse_args([*TINY.split(), "--restarts-in-job", str(limit)])


def parent(rank: int, world: int, port: int, attempt: Attempt) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launch = Launch(rank, world, rank)
    os._exit(restarts.start_again(config(), launch, lambda *world: attempt(rank, int(os.environ[START]))))


def codes_of(world: int, attempt: Attempt) -> list[int]:
    """Start `world` parents that run `attempt`, and return the exit code of each parent."""
    context, port = mp.get_context("fork"), next(PORTS)
    parents: list[Any] = [context.Process(target=parent, args=(rank, world, port, attempt)) for rank in range(world)]
    for process in parents:
        process.start()
    return join(parents)


def advance() -> None:
    assert restarts._progress is not None
    made = int.from_bytes(restarts._progress[:8], "little")
    restarts._progress[:8] = (made + 1).to_bytes(8, "little")


@pytest.mark.parametrize("code", [0, 2, 3, 75, 128 + signal.SIGTERM])
def test_an_exit_without_failure_is_not_restarted(code: int) -> None:
    assert codes_of(1, lambda rank, number: code if number == 0 else 9) == [code]


@pytest.mark.parametrize("code", [0, 3, -signal.SIGRTMIN - 1])
def test_a_rank_that_exits_early_is_restarted(code: int) -> None:
    def attempt(rank: int, number: int) -> int:
        if number == 0 and code < 0:
            os.kill(os.getpid(), -code)
        if number == 0:
            os._exit(code)
        return 75

    assert codes_of(1, attempt) == [75]


def test_a_second_signal_ends_a_rank_that_ignores_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "GRACE", 0.2)
    monkeypatch.setattr(signals, "REPEATED", -1.0)

    def attempt(rank: int, number: int) -> int:
        for _ in range(2):
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.5)
        time.sleep(HANG)
        return 0

    assert codes_of(1, attempt) == [128 + signal.SIGTERM]


def test_a_signal_between_two_starts_reaches_the_next_start() -> None:
    held = signals.ParentSignals()
    with held.taken(), subprocess.Popen(["sleep", str(HANG)]) as child:
        os.kill(os.getpid(), signal.SIGUSR1)
        held.hand_to(child.pid)
        child.terminate()
    assert child.returncode == -signal.SIGUSR1


def test_a_second_signal_between_two_starts_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    number = signal.SIGUSR1
    held = signals.ParentSignals()
    with held.taken():
        os.kill(os.getpid(), number)
        assert (held.first, held.second) == (number, None)
        monkeypatch.setattr(signals, "REPEATED", -1.0)
        with pytest.raises(signals.SecondSignalError), held.between_starts():
            os.kill(os.getpid(), number)
        with pytest.raises(signals.SecondSignalError), held.between_starts():
            pass


def test_starts_without_progress_end_at_the_limit(tmp_path: Path) -> None:
    def attempt(rank: int, number: int) -> int:
        (tmp_path / str(number)).write_text(os.environ[BEGAN])
        if number < 3:
            advance()
        return 1

    assert codes_of(1, attempt) == [1]
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [0, 1, 2, 3, 4]
    # Every start measures the run's duration from the same time.
    assert len({path.read_text() for path in tmp_path.iterdir()}) == 1


def test_a_hanging_rank_is_killed_when_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "GRACE", 0.2)

    def attempt(rank: int, number: int) -> int:
        if number == 0 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return 75

    assert codes_of(3, attempt) == [75] * 3


def test_a_stopped_rank_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "STOPPED", 0.2)

    def attempt(rank: int, number: int) -> int:
        if number == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return 75

    assert codes_of(1, attempt) == [75]


def test_a_rank_that_does_not_reach_the_store_is_restarted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restarts, "UNMET", 1.0)
    monkeypatch.setattr(restarts, "GRACE", 0.2)

    def attempt(rank: int, number: int) -> int:
        if rank == 1 or number == 1:
            restarts.report_met()
        if number == 0:
            time.sleep(HANG)
        return 75

    assert codes_of(2, attempt) == [75, 75]
    assert capfd.readouterr().err.count("has not reached the store in 1 s") == 1


def test_a_stopped_parent_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "STOPPED", 0.2)
    stopped = tmp_path / "stopped"

    def attempt(rank: int, number: int) -> int:
        if rank == 0:
            time.sleep(2 * restarts.ASK)  # by this time, the parents of both ranks have met in the store
            Path(f"{stopped}.new").write_text(str(os.getppid()))
            os.kill(os.getppid(), signal.SIGSTOP)
            os.replace(f"{stopped}.new", stopped)
            time.sleep(HANG)
        wait_for(stopped.exists)
        pid = int(stopped.read_text())
        wait_for(lambda: process_state(pid) in ("", "Z"))
        return 1

    assert codes_of(2, attempt) == [-signal.SIGKILL, 1]


@pytest.mark.parametrize("resumed", ["while the child waits", "for the next start"])
def test_a_stopped_store_continues(resumed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "ANSWER", 0.5)
    monkeypatch.setattr(parents.answered, "__defaults__", (1.0,))
    stores = list[int]()

    def served(*args: Any) -> StoreProcess:
        process = StoreProcess(*args)
        stores.append(process.pid)
        return process

    monkeypatch.setattr(parents, "StoreProcess", served)

    def attempt(rank: int, number: int) -> int:
        if number == 0 and rank == 0:
            (store,) = stores  # The rank's parent started the store process before the fork.
            time.sleep(restarts.ASK / 2)  # Stop the store between two reads by the parent.
            os.kill(store, signal.SIGSTOP)
            wait_for(lambda: process_state(store) == "T")  # The kernel stops the process a moment later.
            if resumed == "while the child waits":
                wait_for(lambda: process_state(store) != "T")
            return 1
        if number == 0:
            # The parent reads in the store that a restart is needed, and ends this rank while it sleeps.
            time.sleep(HANG)
        return 75

    assert codes_of(2, attempt) == [75, 75]


def test_parents_fork_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parents must not have threads when they fork. If a thread held a lock during a fork, the child would wait for the
    lock forever."""
    threads = 0

    def counted() -> int:
        nonlocal threads
        threads = len(list(Path("/proc/self/task").iterdir()))
        return forking.fork()

    monkeypatch.setattr(restarts, "fork", counted)
    assert codes_of(2, lambda rank, number: 1 if number == 0 else 75 if threads == 1 else 3) == [75, 75]


def fails(*args: object) -> None:
    raise KeyError("a device")


@pytest.mark.parametrize(
    ("search", "why"),
    [
        (lambda *args: None, "no layout for the same batch is legal on 1 ranks"),
        (fails, "the search for another layout failed: KeyError: 'a device'"),
    ],
)
def test_the_launcher_decides_if_a_parent_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], search: Callable[..., None], why: str
) -> None:
    monkeypatch.setattr(parents, "ROLL", 0.5)
    monkeypatch.setattr(restarts, "smaller_layout", search)

    def attempt(rank: int, number: int) -> int:
        if rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(HANG)  # the rank is killed together with its parent while it sleeps
        return 1

    assert codes_of(2, attempt) == [1, -signal.SIGKILL]
    said = capfd.readouterr().err
    assert why in said
    assert "not started again in the job: 1 of 2 ranks were lost" in said


def test_a_parent_that_is_launched_late_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may fail before the launcher has launched the parent processes of all ranks."""
    monkeypatch.setattr(parents, "ROLL", 0.5)
    monkeypatch.setattr(parents, "SILENT", 0.5)
    at_once = Parents.of.__func__  # type: ignore[attr-defined]

    def late(cls: type[Parents], config: RunConfig, launch: Launch) -> Parents:
        if launch.rank == 1:
            time.sleep(4 * parents.ROLL)
        return at_once(cls, config, launch)

    monkeypatch.setattr(Parents, "of", classmethod(late))
    assert codes_of(2, lambda rank, number: 1 if number == 0 else 75) == [75, 75]


def test_signals_reach_the_rank(tmp_path: Path) -> None:
    def attempt(rank: int, number: int) -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
        # this simulates a rank that handles SIGTERM and therefore unblocks the signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        (tmp_path / "ready").touch()
        time.sleep(HANG)
        return 1

    context = mp.get_context("fork")
    process: Any = context.Process(target=parent, args=(0, 1, 1, attempt))
    process.start()
    wait_for((tmp_path / "ready").exists)
    process.terminate()
    assert join([process]) == [75]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("whole"), 2, SHARDED)
    run.start()
    return run


def test_a_run_recovers_in_the_job_bitwise(tmp_path: Path, undisturbed: Run) -> None:
    run = Run(tmp_path, 2, [*SHARDED, "--restarts-in-job", "2"])
    said = run.start(Planned("kill", 1, 2), Planned("start", 0, 0, start=1))
    assert "recovered by restart in the job from copies in memory" in said
    run.assert_equal(undisturbed)
    (event,) = run.events("recovery")
    assert (event["rung"], event["source"]) == ("restart in the job", "copies in memory")
    assert event["what"] == "ended by SIGKILL" and event["who"].startswith("rank 1 of 2 "), (
        "as the rank's own parent noted"
    )
    assert 0 <= event["detected_after"] <= event["recovered_after"]
    assert lost_little(event, said), said
    assert not list(run.memory.iterdir())


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((Planned("term kill", 1, 2),), id="before"),
        pytest.param(
            (Planned("kill", 1, 2), Planned("start term", 0, 0, start=1)),
            id="during",
        ),
    ],
)
def test_a_signal_near_a_start_saves_the_copies(faults: tuple[Planned, ...], tmp_path: Path, undisturbed: Run) -> None:
    run = Run(tmp_path, 2, [*SHARDED, "--restarts-in-job", "2"])
    said = run.start(*faults, code=75)
    # The checkpoint is from iteration 3 if a rank had already begun step 3, and from iteration 1 if the copies of step
    # 2 were incomplete.
    assert re.search("saved checkpoint at iteration [123] to", said)
    assert "SIGTERM on rank" in said
    assert "what to do: " not in said and "if the ranks are not started again automatically" in said
    run.start()
    run.assert_equal(undisturbed)


def test_an_unknown_exit_code_is_a_failure(tmp_path: Path, undisturbed: Run) -> None:
    run = Run(tmp_path, 2, [*SHARDED, "--restarts-in-job", "2"])
    said = run.start(Planned("exit", 1, 2))
    assert "rank 1 has ended with code 3 before the end of the run" in said
    run.assert_equal(undisturbed)


def test_the_simultaneous_death_of_all_ranks_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, ["--restarts-in-job", "2"])
    said = run.start(Planned("kill", 0, 2), Planned("kill", 1, 2))
    (event,) = run.events("recovery")
    assert event["what"] == "ended by SIGKILL" and event["who"].startswith("rank ")
    assert lost_little(event, said) and event["source"] == "copies in memory", said
