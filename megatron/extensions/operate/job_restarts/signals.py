"""Handling of signals that a parent receives and passes on to its rank."""

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
    """Raised by a second signal between two starts."""


class ParentSignals:
    """Signal handlers of a parent. They pass each signal on to the child and remember the first one, because a start
    that fails may not have carried it out, and because there is no child between two starts."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.second: int | None = None
        self.child: int | None = None
        """Process ID of the child that receives the signals."""

        self._first_at = 0.0
        self._ends = False
        self._former = dict[int, object]()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Handle the signals that end a run, except a SIGHUP that is ignored, as under nohup."""
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        taken = [each for each in SIGNALS if not (under_nohup and each == signal.SIGHUP)]
        self._former = {each: signal.signal(each, self._receive) for each in taken}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Restore the former signal handlers, in a child or at the end."""
        for each, handler in self._former.items():
            signal.signal(each, handler)  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block signals while a child is forked. In the child they stay blocked until it handles them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def hand_to(self, child: int) -> None:
        """Pass signals on to this child from now on, including the first signal if earlier starts did not carry it
        out."""
        self.child = child
        if self.first is not None:
            self._pass_on(self.first)

    @contextmanager
    def between_starts(self) -> Iterator[None]:
        """Raise SecondSignalError at a second signal."""
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
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.child, number)
