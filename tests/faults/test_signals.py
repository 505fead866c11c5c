"""Tests in which two forked ranks receive stop requests at critical moments. A separate test sends Ctrl-C to a
launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.training import initialize
from megatron.training.config.run_config import RunConfig, TrainingConfig
from megatron.training.reliability.launch import BEGAN, Launch
from megatron.training.reliability.run_status import ExitCode
from megatron.training.reliability.stop_requests import SignalListener
from megatron.training.reliability.watchdog import Watchdog
from tests.extensions import installed
from tests.faults.broken_pretrain import slow_down
from tests.faults.runs import MODEL, ROOT
from tests.forked import forked_ranks, join
from tests.limits import HANG, wait_for

RESUME = ExitCode.TO_BE_RESUMED


class World:
    """Run of two ranks, with its output and its saved checkpoints."""

    def __init__(self, folder: Path, ranks: list[Any]) -> None:
        self.folder, self.ranks = folder, ranks

    @property
    def text(self) -> str:
        return (self.folder / "screen").read_text()

    @property
    def saved(self) -> int | None:
        path = self.folder / "save" / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else None

    @property
    def stopped_at(self) -> int:
        found = re.search(r"exiting at iteration (\d+)", self.text)
        assert found is not None, self.text
        return int(found[1])

    def wait_for(self, said: str | Callable[[], object]) -> None:
        wait_for(lambda: said in self.text if isinstance(said, str) else said(), screen=lambda: self.text)

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks[rank].pid, number)

    def codes(self) -> list[int]:
        return join(self.ranks)


def world(folder: Path, *flags: str, slow: str = "") -> Any:
    arguments = [*MODEL, "--pp", "1", "--save", str(folder / "save"), *flags]
    return forked_ranks(2, arguments, folder / "screen", lambda rank: slow_down(slow))


@pytest.mark.skipif(not installed("resilience"), reason="resilience is deleted")
def test_trigger_files_in_the_save_folder_are_obeyed(tmp_path: Path) -> None:
    with world(tmp_path) as ranks:
        run = World(tmp_path, ranks)
        run.wait_for("start-up (s)")
        (tmp_path / "save" / "save").touch()
        run.wait_for(lambda: run.saved is not None)
        first = run.saved
        (tmp_path / "save" / "exit").touch()
        assert run.codes() == [ExitCode.DONE] * 2
    assert first is not None and run.saved == run.stopped_at > first


def test_a_signal_interrupts_an_evaluation(tmp_path: Path) -> None:
    with world(tmp_path, "--eval-interval", "2", "--eval-iters", "1000000") as ranks:
        run = World(tmp_path, ranks)
        run.wait_for("start-up (s)")
        time.sleep(1.5)
        run.send(1, signal.SIGUSR2)
        assert run.codes() == [RESUME] * 2
    assert run.saved == run.stopped_at <= 2 and "SIGUSR2 on rank 1 of 2" in run.text
    assert "valid loss" not in run.text


def test_a_save_in_progress_is_finished(tmp_path: Path) -> None:
    with world(tmp_path, "--save-interval", "2", slow="publish") as ranks:
        run = World(tmp_path, ranks)
        run.wait_for("publishing")
        run.send(0, signal.SIGTERM)
        assert run.codes() == [RESUME] * 2
    assert "saved checkpoint at iteration 2" in run.text and run.saved == run.stopped_at


def test_a_signal_before_the_first_step_ends_the_run_at_once(tmp_path: Path) -> None:
    with world(tmp_path, slow="data") as ranks:
        run = World(tmp_path, ranks)
        run.wait_for("building data")
        run.send(1, signal.SIGINT)
        assert run.codes() == [RESUME] * 2
    assert run.saved is None and "ending before the first step: SIGINT on rank 1 of 2" in run.text


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    with world(tmp_path, slow="step") as ranks:
        run = World(tmp_path, ranks)
        run.wait_for("in a long step")
        # send repeatedly, because signals that arrive at the same moment count as one signal
        while ranks[1].exitcode is None:
            run.send(1, signal.SIGTERM)
            time.sleep(1.5)
        assert run.codes() == [ExitCode.KILLED + signal.SIGTERM] * 2
    assert run.saved is None and run.text.count("rank 1 of 2") == run.text.count("a second signal") == 1
    assert "RUN FAILED" not in run.text


@pytest.mark.grid("flag", [], ["--exit-margin-in-mins 1", "--exit-duration-in-mins 0.5"])
def test_the_time_limit_saves_a_checkpoint(tmp_path: Path, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's time limit, or the duration given to the run, ends in half a minute."""
    if "margin" in flag:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 90))
    with world(tmp_path, *flag.split()) as ranks:
        run = World(tmp_path, ranks)
        run.codes()
    assert run.saved == run.stopped_at
    assert ("the SLURM job ends in 1.0 minutes" if "margin" in flag else flag) in run.text


def test_changing_the_clock_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The duration given to a run does not depend on the system date. SLURM_JOB_END_TIME is a date, and the SLURM job
    ends an hour after the start of the test."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    config = RunConfig(training=TrainingConfig(exit_duration_in_mins=30, exit_signal_handler=False))
    watchdog, now = Watchdog(Launch()), time.time()
    initialize.connect(config, watchdog)
    initialize.start_watchdog(config, watchdog)
    try:
        assert watchdog.board is not None
        monkeypatch.setattr(time, "time", lambda: now + 7200)
        watchdog._look(watchdog.board)
        assert not watchdog.requests.pending
        monkeypatch.setattr(time, "monotonic", lambda past=time.monotonic: past() + 31 * 60)
        for _ in range(2):
            watchdog._look(watchdog.board)
        assert watchdog.requests.pending
    finally:
        monkeypatch.undo()
        watchdog.close()


def test_the_duration_counts_from_the_first_start_in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEGAN, str(time.monotonic() - 1801))
    config = RunConfig(training=TrainingConfig(exit_duration_in_mins=30, exit_signal_handler=False))
    watchdog = Watchdog(Launch())
    initialize.connect(config, watchdog)
    initialize.start_watchdog(config, watchdog)
    try:
        wait_for(lambda: watchdog.requests.pending)
    finally:
        watchdog.close()


def test_a_signal_to_a_child_does_not_stop_the_run() -> None:
    """If the stop handler were inherited, an extension that ends a worker process with SIGTERM would stop the run."""
    listener = SignalListener()
    listener.start(True)
    try:
        if not (child := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        assert listener.wait(0.0) == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert listener.wait(HANG) == [(signal.SIGTERM, False)]
    finally:
        listener.stop(ignore=False)


@pytest.mark.parametrize("ignored", [False, True], ids=["closed_terminal", "nohup"])
def test_a_terminal_that_closes_stops_the_run_unless_under_nohup(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
    listener = SignalListener()
    listener.start(True)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert listener.wait(0.0) == ([] if ignored else [(signal.SIGHUP, False)])
    finally:
        listener.stop(ignore=False)
        signal.signal(signal.SIGHUP, before)


@pytest.mark.grid("launcher", [], ["torch.distributed.run"])
def test_ctrl_c_reaches_a_launcher_and_all_its_ranks_at_once(tmp_path: Path, launcher: str) -> None:
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node=2", "tests/faults/broken_pretrain.py"]
    command += [*MODEL, "--pp", "1", "--save", str(tmp_path / "save")]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "FAULT": "none:0:0"}
    screen = (tmp_path / "screen").open("w")
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=screen, stderr=screen, start_new_session=True
    ) as process:
        run = World(tmp_path, [])
        run.wait_for("start-up (s)")
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=HANG)
    assert f"exiting at iteration {run.saved}: SIGINT on rank" in run.text
