"""What a command shows of its progress, and how Ctrl-C ends it. No torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def at_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT calls `call`; behind it, as in a process that ignores the signal, all is as it was before."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        call()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_process() -> None:
    """Ends the process at once, with exit code 130 and one line on standard error. For a command that has nothing to
    save: a KeyboardInterrupt is lost where a callback of torch or of a fork runs. Children end with it, as those of
    `fake_rank.forked` do."""
    with suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(128 + signal.SIGINT)


SECONDS_BETWEEN_LINES = 10.0
"""Of progress, where standard error is no terminal."""


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yields what says on standard error how far a command is, if it has not just done so: in one line of a terminal,
    elsewhere in a line now and then."""
    terminal, said = sys.stderr.isatty(), time.monotonic()

    def say(text: str) -> None:
        nonlocal said
        if time.monotonic() >= said + (0.2 if terminal else SECONDS_BETWEEN_LINES):
            said = time.monotonic()
            print(f"\r{text}\033[K" if terminal else f"{text}\n", end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
