"""Receives signals on a socket, so that a thread sees them while the main thread is inside a collective."""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from typing import Any

from megatron.training.reliability.launch import SIGNALS

REPEATED = 1.0
"""Seconds within which another signal counts as the first one: launchers and SLURM both deliver it."""


class SignalListener:
    """Turns signals into values that `wait` returns."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        """`time.monotonic()` of the first signal."""

        self._sockets: tuple[socket.socket, ...] = ()
        self._handlers: dict[int, Any] = {}

    def start(self, listen: bool) -> None:
        """Takes over the signals if `listen`, on the main thread. Signals that were held since the start arrive now."""
        wake, receives = self._sockets = socket.socketpair()
        wake.setblocking(False)
        receives.setblocking(False)
        if listen and threading.current_thread() is threading.main_thread():
            # The byte on the socket comes also while the main thread is inside a collective; the handler does not.
            signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, _ignore) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see hold_ignored_signals

    def wait(self, seconds: float) -> list[tuple[signal.Signals, bool]]:
        """Waits for signals. Returns (signal, whether it is a second one), without repetitions of the first."""
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
        """Gives the signals back to the handlers from before, or has them ignored from now on."""
        if not self._handlers:
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if ignore else handler)


def _ignore(number: int, frame: Any) -> None:
    """The thread acts on the signal; without a handler it would end the process."""
