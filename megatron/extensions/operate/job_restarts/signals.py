"""Signal handlers of a parent process, which forward signals to the child process that trains as a rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from megatron.training.reliability.launch import SIGNALS
from megatron.training.reliability.stop_requests import REPEATED


class SecondSignalError(Exception):
    """Raised when a second signal arrives after the ranks have ended and before they are started again."""


class ParentSignals:
    """Signal handlers of a parent. The handlers forward each signal to the child. The first signal is also stored for
    the next child, because a failing child may not have handled the signal, or no child may have been running."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.second: int | None = None
        self.child: int | None = None
        """Process id of the child that receives the signals; None while no child runs."""

        self._first_at = 0.0
        self._ends = False
        self._former = dict[int, object]()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Install handlers for the signals that end a run, for the duration of the `with` block. SIGHUP is not handled
        if it is ignored, as under nohup."""
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        taken = [each for each in SIGNALS if not (under_nohup and each == signal.SIGHUP)]
        self._former = {each: signal.signal(each, self._receive) for each in taken}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Restore the previous signal handlers, in a child or at the end of the run."""
        for each, handler in self._former.items():
            signal.signal(each, handler)  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block signals while a child is forked. In the child, signals stay blocked until the child installs its
        handlers."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def hand_to(self, child: int) -> None:
        """Forward all further signals to the process `child`. A signal that arrived earlier is forwarded
        immediately."""
        self.child = child
        if self.first is not None:
            self._pass_on(self.first)

    @contextmanager
    def between_starts(self) -> Iterator[None]:
        """Raise SecondSignalError in the `with` block if a second signal arrives."""
        self._ends = True
        try:
            if self.second is not None:
                raise SecondSignalError
            yield
        finally:
            self._ends = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = number, now
        elif now - self._first_at > REPEATED:
            self.second = number
        self._pass_on(number)
        if self.second is not None and self._ends:
            raise SecondSignalError

    def _pass_on(self, number: int) -> None:
        if self.child is not None:
            with suppress(ProcessLookupError):  # the child has ended in the meantime
                os.kill(self.child, number)
