"""A thread beside the training that sees signals and the ends of other ranks, and ends this one with them.

Stopping. A signal, a time limit or a file on any one rank becomes a request on the board. Each rank answers with the
number of ticks it has begun (a tick: a step, or a batch of an evaluation; all ranks make the same ones) and begins no
further one until the agreed tick is known, which is the highest answer. So all ranks stop after the same tick, and as
long as nobody asks, a tick costs the test of a flag: no collective, no wait for the device.

Failing. The first rank to fail puts its report on the board; the others dump their stacks, say where they were and
leave without a word. An error that another rank's end may have caused waits for a better one first.
"""

from __future__ import annotations

import faulthandler
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from megatron.training.reliability.failure_handler import Ending
from megatron.training.reliability.failure_report import ADVICE, Failure
from megatron.training.reliability.flight_recorder import Entered
from megatron.training.reliability.launch import SIGNALS, Launch, write_error_file
from megatron.training.reliability.rank_store import Board, Request
from megatron.training.reliability.run_status import ExitCode

PERIOD = 0.4
"""Seconds between two looks at the board."""

PARTING = 5.0
"""Seconds that a rank waits at most for others to have seen why it leaves."""

REPEATED = 1.0
"""Seconds within which a signal is the first one again: launchers and SLURM both deliver it."""


@dataclass(frozen=True)
class Limits:
    """What ends a run beside signals."""

    signals: bool = True
    deadlines: dict[str, tuple[float, str]] = field(default_factory=dict)
    """What is over -> (time.time() at which it is, kind of the request)."""

    folder: Path | None = None
    """Where `save` and `exit` files are looked for, and stacks are written."""


class Watch(Ending):
    """What one rank knows of the others. Without `start` it asks for nothing and costs nothing."""

    def __init__(self, launch: Launch | None = None) -> None:
        super().__init__(launch or Launch())
        self.request: Request | None = None
        """What is asked for, once it is agreed and all ticks before it are made."""

        self._ticks, self._number = 0, 0
        self._asked: Request | None = None
        self._after: int | None = None
        self._wishes: list[Request] = []
        self._stuck = set[Path | None]()
        """Trigger files that could not be removed."""
        self._change = threading.Condition()
        self._handlers: dict[int, Any] = {}
        self._meetings = 0
        self._thread: threading.Thread | None = None

    # What the training calls.

    def connect(self, board: Board) -> None:
        """From now on a failure on this rank is told to all."""
        self._board = board

    def start(self, limits: Limits) -> None:
        """Begins to watch, once connected. Call it on the main thread, which is the one whose place is reported.

        Raises ValueError if the folder cannot be written.
        """
        self._limits = limits
        if limits.folder is not None:
            self._stacks = self._open_stacks(limits.folder / "stacks")
            faulthandler.enable(self._stacks)
        self._wake, receives = socket.socketpair()
        self._wake.setblocking(False)
        receives.setblocking(False)
        self._receives = receives
        if limits.signals and threading.current_thread() is threading.main_thread():
            # The byte on the socket comes also while the main thread is inside a collective; the handler does not.
            signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, _ignore) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see hold_ignored_signals
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _open_stacks(self, folder: Path) -> TextIO:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return (folder / f"rank-{self.launch.rank:05d}.txt").open("w")
        except OSError as error:
            raise ValueError(
                f"--save {folder.parent}: rank {self.launch.rank} cannot write there ({error}); name a folder that "
                "every rank can write"
            ) from error

    def begin(self, phase: str) -> None:
        """Names what comes next, for the report of a failure."""
        self.phase = phase

    def together(self, what: str, minutes: float) -> None:
        """Returns when all ranks have come here. Raises TimeoutError, which names those that have not, if they do not
        within `minutes`."""
        board = self._board
        if board is None or self.launch.world_size == 1:
            return
        self._meetings += 1
        name, deadline, pause = str(self._meetings), time.monotonic() + 60 * minutes, 0.001
        self._meeting = Entered("the ranks at start-up", tuple(board.ranks), self._meetings, f"the end of {what}", True)
        board.come(name)
        while not board.all_came(name):
            if time.monotonic() > deadline:
                missing = ", ".join(map(str, board.missing(name)))
                raise TimeoutError(f"timed out: these ranks did not end {what} within {self.limit}: {missing}")
            time.sleep(pause)
            pause = min(2 * pause, PERIOD)
        self._meeting = replace(self._meeting, pending=False)

    @property
    def stopping(self) -> bool:
        """Whether the ranks are to stop now."""
        return self.request is not None and self.request.kind != "save"

    @property
    def resumes(self) -> bool:
        """Whether the run was cut short, and is to be started again."""
        return self.request is not None and self.request.kind == "resume"

    @property
    def why(self) -> str:
        return self.request.why if self.request is not None else ""

    def tick(self, save_later: bool = False) -> bool:
        """Begins a tick; False if a request is due first: `request` then is it, and no tick is begun. With
        `save_later` only a request to stop keeps it from beginning."""
        if self._board is None:
            return True
        with self._change:
            while self._asked is not None:
                if self._after is not None:
                    if self._ticks < self._after or (save_later and self._asked.kind == "save"):
                        break
                    self.request = self._asked
                    return False
                self._change.wait()
            self._ticks += 1
            return True

    def done(self) -> None:
        """The request is carried out, and the next one may come."""
        with self._change:
            self.request = self._asked = self._after = None
            self._number += 1

    def close(self) -> None:
        """Ends the watch in peace. Waits a little for ranks that are slower, as the store may live on this one."""
        if self._board is None:
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5)
        self._board.store.set(f"over/{self.launch.rank}", "")
        if self.launch.rank == 0:
            self._wait(lambda board: len(board.get_all("over")) == self.launch.world_size, 10.0)
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                # A launcher sends SIGTERM to the others as soon as the first rank has ended.
                signal.signal(number, handler if self.launch.launcher == "none" else signal.SIG_IGN)
        if self.resumes:
            write_error_file(f"saved; start again to go on: {self.why}")
        if self.launch.rank == 0:
            self.outcome.end(ExitCode.TO_BE_RESUMED if self.resumes else ExitCode.DONE, self.why)
        self._board = None

    # The thread.

    def _run(self) -> None:
        while not self._closed.is_set():
            ready, _, _ = select.select([self._receives], [], [], PERIOD)
            try:
                if ready:
                    self._on_signals(self._receives.recv(64))
                self._look()
            except RuntimeError as error:  # the store is gone, and with it the process that held it
                if not self._closed.wait(1.0):
                    self._store_lost(error)

    def _look(self) -> None:
        board = self._board
        assert board is not None
        board.beat(self._phase())
        cause = board.cause()
        if cause is not None and cause.reporter != self.launch.rank:
            self._only_once()
            self._follow(cause)
        over = None
        for rank, peer in board.neighbours().items():
            if not peer.state() and (over := board.get_all("over")) is not None and rank not in over:
                self._only_once()
                self._end(
                    Failure(
                        self.launch.rank,
                        self._name(rank),
                        f"{board.last_phase(rank) or 'unknown'}, at its last sign of life",
                        "process is gone",
                        f"process {peer.pid} is gone and left no traceback{self._last_words(rank)}",
                        ADVICE["died"],
                    )
                )
        self._look_at_requests(board)

    def _look_at_requests(self, board: Board) -> None:
        if self._asked is None:
            if self.launch.rank == 0:
                self._look_at_limits()
            if self._wishes:
                board.ask(self._number, self._wishes[0])
            request = board.asked(self._number)
            if request is not None:
                if request in self._wishes:
                    self._wishes.remove(request)
                with self._change:
                    self._asked = request
                    board.say_position(self._number, self._ticks)
        if self._asked is not None and self._after is None:
            after = board.agreed(self._number)
            if after == 0 and self._asked.kind == "resume":  # no rank has trained yet: nothing to save
                self._leave(ExitCode.TO_BE_RESUMED, f"ending before the first step: {self._asked.why}")
            with self._change:
                self._after = after
                self._change.notify_all()
            if after is None and self._ticks == 0 and self._signal_at and time.monotonic() - self._signal_at > 5:
                self._leave(ExitCode.TO_BE_RESUMED, "ending though not all ranks have come up")

    def _look_at_limits(self) -> None:
        for why, (when, kind) in self._limits.deadlines.items():
            if time.time() >= when:
                self._ask(Request(kind, why))
        for name, kind in (("save", "save"), ("exit", "stop")):
            path = self._limits.folder / name if self._limits.folder is not None else None
            try:
                if path is not None and path.is_file():
                    path.unlink()
                    self._ask(Request(kind, f"{path} was there"))
            except OSError as error:  # this thread has to live on: it hears signals too
                if path not in self._stuck:
                    print(f"{path} is not heeded, as it cannot be removed: {error}", file=sys.stderr, flush=True)
                self._stuck.add(path)

    def _ask(self, request: Request) -> None:
        if request not in self._wishes:
            self._wishes.append(request)

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in SIGNALS:
                continue
            name, now = signal.Signals(number).name, time.monotonic()
            if self._signal_at is None:
                self._signal_at = now
                self._ask(Request("resume", f"{name} on {self._name()}"))
            elif now - self._signal_at > REPEATED and not self._failing.locked():
                self._killed(number, name)

    def _killed(self, number: int, name: str) -> NoReturn:
        """Ends at once by a second signal, and the other ranks with this one."""
        self._only_once()
        message = f"{self._name()}: a second signal, {name}, in {self._phase()}: ending at once"
        print(message, file=sys.stderr, flush=True)
        write_error_file(message)
        self.outcome.end(ExitCode.KILLED + number, message)
        board = self._board
        assert board is not None
        failure = Failure(self.launch.rank, self._name(), self._phase(), message, "", "", ExitCode.KILLED + number)
        try:
            board.post_cause(failure)
            board.store.set("told", failure.to_json())
            # The others have seen it before this process, and perhaps the store with it, is gone.
            self._wait(lambda b: len(b.get_all("left")) >= self.launch.world_size - 1, PARTING)
        except RuntimeError:
            pass
        self._exit(failure.code)

    def _leave(self, code: int, message: str) -> NoReturn:
        """Ends all ranks before there is anything to save."""
        self._only_once()
        if self.launch.rank == 0:
            print(message, file=sys.stderr, flush=True)
            self.outcome.end(code, message)
        write_error_file(message)
        assert self._board is not None
        with suppress(RuntimeError):
            # All ranks have seen it when the first of them ends, and the one that may hold the store ends last.
            self._board.come("leave")
            self._wait(lambda board: board.all_came("leave"), PARTING)
            time.sleep(PERIOD if self.launch.rank == 0 else 0.0)
        self._exit(code)

    def _store_lost(self, error: RuntimeError) -> NoReturn:
        """The launcher, or rank 0 where there is none, has ended: nobody is left to talk through."""
        self._only_once()
        if self._signal_at is None and self.launch.local_rank <= (self.launch.launcher == "srun"):
            what = f"the store of the ranks does not answer: {error}"
            who = "rank 0 or the launcher, which holds the store of the ranks"
            print(Failure(self.launch.rank, who, self._place(), "", what, ADVICE["died"]).text(), file=sys.stderr)
        self._exit(ExitCode.FAILED)


def _ignore(number: int, frame: Any) -> None:
    """The thread acts on the signal; but for a handler it would end the process."""
