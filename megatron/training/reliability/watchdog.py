"""Watchdog of a rank: a thread that handles signals, requests and the failures of other ranks during training.

The watchdog consists of several parts: `RankStatus` describes what this rank is doing, `SignalListener` receives
signals, `StopRequests` agrees with the other ranks when to stop or save, `StackDump` writes stacks, and
`FailureHandler` ends the ranks with one report. Extensions may add further conditions for the watchdog to check
(`Watch`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

from megatron.training.reliability.failure_handler import FailureHandler
from megatron.training.reliability.failure_report import LateRanksError
from megatron.training.reliability.launch import Launch, write_error_file
from megatron.training.reliability.rank_status import Meeting, RankStatus
from megatron.training.reliability.rank_store import PERIOD, Board, Request
from megatron.training.reliability.run_status import ExitCode, Outcome
from megatron.training.reliability.stack_dump import StackDump
from megatron.training.reliability.stop_requests import SignalListener, StopRequests


class Watch:
    """Condition that the watchdog checks for a callback, such as the state of other hosts. If the condition means that
    the run cannot continue, the watch ends all ranks through `Watchdog.failures`."""

    def start(self) -> None:
        """Prepare the watch. Called after the run's folders are known to be writable, and before the watchdog's thread
        starts. An exception from this method ends the run."""

    def look(self) -> None:
        """Check the condition. Called on the watchdog's thread, about twice per second. This method may read from the
        store."""

    def close(self) -> None:
        """Called at the end of the run."""


class Watchdog:
    """Watchdog over this rank and the other ranks. Until `connect` and `start` are called, the other methods return
    immediately."""

    def __init__(self, launch: Launch | None = None) -> None:
        self.launch = launch or Launch()
        self.status = RankStatus()
        self.requests = StopRequests()
        self.stacks = StackDump()
        self.signals = SignalListener()
        self.outcome = Outcome.from_environment()
        self.complaint = ""
        """Message of the exception that a callback raised after the end of the run; empty if no callback raised one."""

        self.save_guards: list[Callable[[], None]] = []
        """Checks that extensions add. Each check runs on the first rank, and raises OSError while the run must not
        write to --save."""

        self.failures = FailureHandler(self.launch, self.status, self.stacks, self.signals, self.outcome)
        self.board: Board | None = None
        self.watches: list[Watch] = []
        """Conditions that the watchdog checks for callbacks. All conditions must be added before `start` is called."""

        self._deadlines: Mapping[str, tuple[float, str]] = {}
        self._meetings = 0
        self._looked = time.time()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def connect(self, board: Board) -> None:
        """Connect to the store. After this call, failures of this rank are reported to all ranks."""
        self.board = board
        self.failures.connect(board)

    def start(self, signals: bool, deadlines: Mapping[str, tuple[float, str]]) -> None:
        """Start the watchdog's thread. Call this method on the main thread, after `connect`.

        `signals` is True if the watchdog must end the run on signals such as SIGTERM. `deadlines` contains requests to
        stop or save at a given time. The dict maps the reason of each request to a pair (`time.monotonic()` value of
        the deadline, kind of the request).
        """
        assert self.board is not None, "connect first"
        self._deadlines = deadlines
        for watch in self.watches:
            watch.start()
        self.signals.start(signals)
        self._thread = threading.Thread(target=self._run, args=(self.board,), name="watchdog", daemon=True)
        self._thread.start()

    @property
    def code(self) -> ExitCode:
        """Return the exit code of a run that ends without a failure."""
        if self.requests.resumes:
            return ExitCode.TO_BE_RESUMED
        return ExitCode.CALLBACK_FAILED if self.complaint else ExitCode.DONE

    def check_save_folder(self) -> None:
        """Raise OSError if a check in `save_guards` currently forbids writing to the --save folder. Called on the first
        rank."""
        for guard in self.save_guards:
            guard()

    def doing(self, phase: str) -> None:
        """Set the current phase, for failure reports."""
        self.status.phase = phase

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks because of an exception on this rank. If this rank is not connected to the other ranks,
        re-raise the exception."""
        self.failures.fail(error)

    def together(self, what: str, minutes: float) -> None:
        """Wait until all ranks have finished the start-up phase `what`.

        Raises LateRanksError, which names the missing ranks, if some ranks do not finish within `minutes`.
        """
        board, status = self.board, self.status
        if board is None or self.launch.world_size == 1:
            return
        self._meetings += 1
        name = str(self._meetings)
        deadline = time.monotonic() + 60 * minutes
        pause = 0.001
        status.meeting = Meeting(tuple(board.ranks), self._meetings, what)
        board.come(name)
        while self.failures.ending or not board.all_came(name):  # after a failure, wait without using the store
            if time.monotonic() > deadline:
                raise LateRanksError(board.missing(name), what, status.limit)
            time.sleep(pause)
            pause = min(2 * pause, PERIOD)
        status.meeting = replace(status.meeting, pending=False)

    def close(self) -> None:
        """Stop watching the ranks. The process of rank 0 may host the store, so rank 0 waits briefly for slower ranks,
        which still need the store."""
        board = self.board
        first = self.launch.rank == 0
        code = self.code
        if board is None:
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5)
        for watch in self.watches:
            watch.close()
        board.ignored.close()
        board.say("over")
        if first:
            board.wait(lambda: len(board.get_all("over")) == self.launch.world_size, 10.0)
        # A launcher sends SIGTERM to the other ranks as soon as the first rank has ended.
        self.signals.stop(ignore=self.launch.launcher != "none")
        if code == ExitCode.TO_BE_RESUMED:
            write_error_file(f"saved; start again to resume: {self.requests.why}")
        elif code == ExitCode.CALLBACK_FAILED:
            write_error_file(f"the run has ended and is saved, but {self.complaint}")
        if first:
            self.outcome.end(code, self.requests.why or self.complaint)
        self.board = None

    def _run(self, board: Board) -> None:
        while not self._closed.is_set():
            signals = self.signals.wait(PERIOD)
            try:
                for number, second in signals:
                    if not second:
                        self.requests.ask(Request("resume", f"{number.name} on {board.name(self.launch.rank)}"))
                    elif not self.failures.ending:
                        self.failures.kill_all(number)
                if not self.failures.left:
                    self._look(board)
            except RuntimeError as error:  # the process that hosts the store has ended
                if not self._closed.wait(1.0):
                    self.failures.store_lost(error)

    def _look(self, board: Board) -> None:
        board.beat(self.status.phase_and_action())
        board.watch_first()
        for watch in self.watches:
            watch.look()
        seen, self._looked = self._looked, time.time()
        cause = board.cause()
        if cause is not None and cause.reporter != self.launch.rank:
            self.failures.follow(cause)
        for rank, peer in board.neighbours().items():
            if not peer.state() and rank not in board.get_all("over"):
                self.failures.report_gone(rank, seen)
        if self.launch.rank == 0 and not self.requests.pending:
            for why, (when, kind) in self._deadlines.items():
                if time.monotonic() >= when:
                    self.requests.ask(Request(kind, why))
        if message := self.requests.look(board, self.signals.first_at):
            self.failures.leave(message)
