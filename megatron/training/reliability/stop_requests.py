"""Signals, and requests to stop or save the run, which all ranks carry out after the same step.

A signal, a time limit or a file on any one rank becomes a request in the rank store. Each rank answers with the number
of ticks it has begun (a tick is a step, or one batch of an evaluation; all ranks make the same ones) and begins no
other one until the agreed tick is known: the highest answer. So all ranks stop after the same tick. As long as there is
no request, a tick costs the test of a flag: no collective, and no wait for the device. Signals arrive on a socket, so
that a thread sees them while the main thread is inside a collective.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from megatron.training.reliability.launch import SIGNALS, START
from megatron.training.reliability.rank_store import Board, Request

UNANSWERED = 5.0
"""Seconds after a signal before the first step, after which this rank no longer waits for answers of the others."""


class StopRequests:
    """Holds one request at a time. `tick` and `done` are for the training thread, `ask` and `look` for the watchdog."""

    def __init__(self) -> None:
        self.request: Request | None = None
        """The request to carry out now: it is agreed, and all ticks before it are made."""

        self.undecided = False
        """True on all ranks of a run that may begin with a state which is on no disk, until they know: they answer no
        request before that. Set it before the watchdog starts."""

        self._ticks, self._number = 0, 0
        self._asked: Request | None = None
        self._after: int | None = None
        self._wishes: list[Request] = []
        self._change = threading.Condition()

    @property
    def pending(self) -> bool:
        """True if there is a request that is not carried out yet."""
        return self._asked is not None

    @property
    def stopping(self) -> bool:
        """True if the run is to stop now."""
        return self.request is not None and self.request.kind != "save"

    @property
    def resumes(self) -> bool:
        """True if the run was cut short and is to be started again."""
        return self.request is not None and self.request.kind == "resume"

    @property
    def why(self) -> str:
        return self.request.why if self.request is not None else ""

    def tick(self, save_later: bool = False) -> bool:
        """Begin a tick. Returns False, and begins none, if a request is due first: it is then in `request`. With
        `save_later` only a request to stop is due."""
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

    def decide(self, unsaved: bool) -> None:
        """End `undecided`, alike on all ranks. To load a state that is on no disk is a tick, so that a request to stop
        that comes before the first step is carried out after it: by a save."""
        with self._change:
            self._ticks += unsaved
            self.undecided = False

    def done(self) -> None:
        """End the current request, so that the next one can be made."""
        with self._change:
            self.request = self._asked = self._after = None
            self._number += 1

    def ask(self, request: Request) -> None:
        """Add a wish of this rank."""
        if request not in self._wishes:
            self._wishes.append(request)

    def look(self, board: Board, signal_at: float | None) -> str | None:
        """Exchange requests and answers with the other ranks. `signal_at`: monotonic time of this rank's first signal.

        Returns why the run is to end at once, if that is before its first step, so that there is nothing to save.
        """
        if self._asked is None:
            if self._wishes:
                board.ask(self._number, self._wishes[0])
            request = board.asked(self._number)
            if request is not None:
                if request in self._wishes:
                    self._wishes.remove(request)
                with self._change:
                    self._asked = request
        if self._asked is not None and self._after is None and not self.undecided:
            board.say(f"at/{self._number}", str(self._ticks))  # no tick begins until all ranks know each other's
            after = board.agreed(self._number)
            if after == 0 and self._asked.kind == "resume":
                return f"ending before the first step: {self._asked.why}"
            with self._change:
                self._after = after
                self._change.notify_all()
        unanswered = self._asked is not None and self._after is None and self._ticks == 0
        late = bool(signal_at) and time.monotonic() - (signal_at or 0.0) > UNANSWERED
        return "ending though not all ranks have come up" if unanswered and late and not self._waits(board) else None

    def _waits(self, board: Board) -> bool:
        """Return True if this rank may have to save a state, with all ranks: they have come up, or they do soon."""
        return self.undecided and (int(os.environ.get(START, "0")) > 0 or board.complete("peer"))


REPEATED = 1.0
"""Seconds within which another signal counts as the first one: launchers and SLURM both deliver it."""


class SignalListener:
    """Turns signals into values that `wait` returns."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        """`time.monotonic()` of the first signal."""

        self._sockets: tuple[socket.socket, ...] = ()
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def start(self, listen: bool) -> None:
        """Take over the signals if `listen`, on the main thread. Signals that were held since the start arrive now."""
        wake, receives = self._sockets = socket.socketpair()
        wake.setblocking(False)
        receives.setblocking(False)
        if listen and threading.current_thread() is threading.main_thread():
            # The byte on the socket comes also while the main thread is inside a collective; the handler does not.
            signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_forget_socket)  # a signal to a child is none to this process
            under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            taken = [number for number in SIGNALS if not (under_nohup and number == signal.SIGHUP)]
            self._handlers = {number: signal.signal(number, _ignore) for number in taken}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see hold_ignored_signals

    def wait(self, seconds: float) -> list[tuple[signal.Signals, bool]]:
        """Wait for signals. Returns (signal, whether it is a second one), without repetitions of the first."""
        _, receives = self._sockets
        ready, _, _ = select.select([receives], [], [], seconds)
        found = []
        for number in receives.recv(64) if ready else b"":
            now = time.monotonic()
            if number not in SIGNALS:
                continue
            if self.first_at is None:
                self.first_at = now
                found.append((signal.Signals(number), False))
            elif now - self.first_at > REPEATED:
                found.append((signal.Signals(number), True))
        return found

    def stop(self, ignore: bool) -> None:
        """Give the signals back to the handlers from before, or has them ignored from now on."""
        if not self._handlers:
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if ignore else handler)


def _forget_socket() -> None:
    with suppress(ValueError):  # of a thread that is not the main one
        signal.set_wakeup_fd(-1)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The thread acts on the signal; without a handler it would end the process."""
