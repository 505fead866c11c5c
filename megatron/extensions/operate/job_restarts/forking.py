"""Fork processes that end when their parent ends."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def fork() -> int:
    """Fork a process that the kernel kills when the calling process ends. Return 0 in the new process, and the id of
    the new process in the calling process."""
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the prctl call, so no signal will arrive
            os._exit(1)
    return pid
