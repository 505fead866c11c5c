"""Progress output and Ctrl-C handling for long commands. This module does not import torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def at_interrupt(call: Callable[[], None], signals: Sequence[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Call `call` when the first interrupt signal arrives. Afterwards, the previous handlers are restored.

    A signal that the process ignored before is still ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in signals}
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        call()

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


def end_process() -> None:
    """End the process immediately, with exit code 130 and one line on standard error.

    Use this function for commands that have no results to save. KeyboardInterrupt is not raised, because an exception
    inside a torch or fork callback would be lost. Child processes, such as those of `fake_rank.forked`, end with this
    process.
    """
    with suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(128 + signal.SIGINT)


SECONDS_BETWEEN_LINES = 10.0
"""Seconds between progress lines if standard error is not a terminal."""


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that reports progress on standard error at most once per interval.

    On a terminal, the function updates one line; elsewhere, it prints a new line each time.
    """
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
