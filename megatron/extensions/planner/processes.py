"""Ends of processes: of a command by Ctrl-C at any place in its code, and of children with their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

PR_SET_PDEATHSIG = 1


@contextmanager
def ctrl_c_ends_the_process() -> Iterator[None]:
    """Within it SIGINT ends the process at once, with exit code 130 and one line on standard error. For a command that
    has nothing to save: a KeyboardInterrupt is lost where a callback of torch or of a fork runs. A signal that the
    process ignores stays ignored. Children must call `end_with_parent`."""
    handler = signal.getsignal(signal.SIGINT)
    if handler == signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(128 + number)


def end_with_parent(parent: int) -> None:
    """Has Linux kill this forked process when its parent, the process `parent`, ends, however that ends. Ctrl-C, which
    reaches all processes of a terminal, is left to the parent; SIGTERM ends this process as it would any other."""
    import ctypes

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before
