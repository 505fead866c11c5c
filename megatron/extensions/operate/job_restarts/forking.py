"""Processes that a parent forks: they end with it."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def fork() -> int:
    """Fork a process that the kernel kills when this one ends. Return 0 in the new process, else its number."""
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before the call
            os._exit(1)
    return pid
