"""Handling of signals and of requests to stop or save the run. All ranks carry out a request after the same step.

If a rank notices a signal, a time limit or a request file, it puts a request into the rank store. A tick is a step or
an evaluation batch; all ranks perform the same ticks. Each rank answers a request with the number of ticks that the
rank has begun, and begins no further tick until all answers are known. The highest of these numbers is the agreed tick,
after which all ranks carry out the request. If there is no request, a tick only tests a flag, without a collective and
without waiting for the device. Signals arrive on a socket, so that a thread receives them while the main thread is
inside a collective.
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
"""Seconds to wait for answers from other ranks if a signal arrives before the first step."""


class StopRequests:
    """Current request to stop or save, and this rank's queue of further requests. The training thread calls `tick` and
    `done`, and the watchdog's thread calls `ask` and `look`."""

    def __init__(self) -> None:
        self.request: Request | None = None
        """Request to carry out now, or None if there is no such request. All ranks carry out the request at the same
        point, after the same number of ticks."""

        self.undecided = False
        """True while it is unknown whether the run starts from a state that is not on disk. The attribute has the same
        value on all ranks. While it is True, ranks answer no request. The attribute must be set before the watchdog
        starts."""

        self._ticks, self._number = 0, 0
        self._asked: Request | None = None
        self._after: int | None = None
        self._wishes: list[Request] = []
        self._change = threading.Condition()

    @property
    def pending(self) -> bool:
        """True if there is a request that has not been carried out yet."""
        return self._asked is not None

    @property
    def stopping(self) -> bool:
        """True if the run must stop now."""
        return self.request is not None and self.request.kind != "save"

    @property
    def resumes(self) -> bool:
        """True if the current request stops the run so that it can be restarted."""
        return self.request is not None and self.request.kind == "resume"

    @property
    def why(self) -> str:
        return self.request.why if self.request is not None else ""

    def tick(self, save_later: bool = False) -> bool:
        """Begin a tick and return True. If all ranks must carry out a request now, do not begin a tick, but store the
        request in `request` and return False. If `save_later` is True, requests to save are postponed."""
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
        """Set whether the run starts from a state that is not on disk. `unsaved` must have the same value on all ranks.
        Loading a state that is not on disk counts as a tick. A request to stop before the first step is therefore
        carried out after loading, and the state is saved."""
        with self._change:
            self._ticks += unsaved
            self.undecided = False

    def done(self) -> None:
        """Mark the current request as carried out, so that another request can be made."""
        with self._change:
            self.request = self._asked = self._after = None
            self._number += 1

    def ask(self, request: Request) -> None:
        """Add a request of this rank to the queue. `look` later sends the request to the other ranks."""
        if request not in self._wishes:
            self._wishes.append(request)

    def look(self, board: Board, signal_at: float | None) -> str | None:
        """Exchange requests and answers with the other ranks. `signal_at` is the `time.monotonic()` value of this
        rank's first signal.

        Return the reason if the run must end immediately, and None otherwise. The run can end immediately only before
        the first step, when there is nothing to save.
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
            # This rank begins no further step or evaluation batch until all ranks have answered.
            board.say(f"at/{self._number}", str(self._ticks))
            after = board.agreed(self._number)
            if after == 0 and self._asked.kind == "resume":
                return f"ending before the first step: {self._asked.why}"
            with self._change:
                self._after = after
                self._change.notify_all()
        unanswered = self._asked is not None and self._after is None and self._ticks == 0
        late = bool(signal_at) and time.monotonic() - (signal_at or 0.0) > UNANSWERED
        return "ending although some ranks have not started" if unanswered and late and not self._waits(board) else None

    def _waits(self, board: Board) -> bool:
        """Return True if this rank must wait, because it may have to save together with ranks that have started or will
        start soon."""
        return self.undecided and (int(os.environ.get(START, "0")) > 0 or board.complete("peer"))


REPEATED = 1.0
"""Seconds after the first signal within which a further signal is ignored. Both a launcher and SLURM may deliver the
same signal."""


class SignalListener:
    """Receiver of signals. `wait` returns the received signals."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        """Time of the first signal, by `time.monotonic()`."""

        self._sockets: tuple[socket.socket, ...] = ()
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def start(self, listen: bool) -> None:
        """Start receiving signals if `listen` is True. Call this method on the main thread. This method also delivers
        signals that arrived earlier, which have been blocked since the start of the process."""
        wake, receives = self._sockets = socket.socketpair()
        wake.setblocking(False)
        receives.setblocking(False)
        if listen and threading.current_thread() is threading.main_thread():
            # The byte arrives on the socket even while the main thread is inside a collective. A Python signal handler
            # would not run during that time.
            signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_forget_socket)  # a forked child must not write to this socket
            under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            taken = [number for number in SIGNALS if not (under_nohup and number == signal.SIGHUP)]
            self._handlers = {number: signal.signal(number, _ignore) for number in taken}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see hold_ignored_signals

    def wait(self, seconds: float) -> list[tuple[signal.Signals, bool]]:
        """Wait for signals. Return pairs (signal, is_second), where `is_second` is True if the user has sent a second
        signal. If the first signal arrives several times, it is returned once."""
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
        """Stop receiving signals. Ignore further signals if `ignore` is True; otherwise restore the previous
        handlers."""
        if not self._handlers:
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if ignore else handler)


def _forget_socket() -> None:
    with suppress(ValueError):  # raised if a thread other than the main thread forked
        signal.set_wakeup_fd(-1)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing, because the watchdog's thread acts on the signal. If no handler were installed, the signal would end
    the process."""
