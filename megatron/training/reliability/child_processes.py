"""Child processes of a rank that ends without Python's own end. No torch.

An extension ends its processes in `on_end`, which a run that fails does not reach.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

GRACE = 0.5
"""Seconds between the signals SIGTERM and SIGKILL."""


def end_children() -> None:
    """Ends the child processes of this process, except those with a session of their own, which are meant to stay."""
    with suppress(OSError):
        session = os.getsid(0)
        children = [pid for pid in _children() if os.getsid(pid) == session]
        for number in (signal.SIGTERM, signal.SIGKILL):
            children = [pid for pid in children if _is_running(pid)]
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            limit = time.monotonic() + GRACE
            while any(map(_is_running, children)) and time.monotonic() < limit:
                time.sleep(0.01)


def _children() -> list[int]:
    """Children of all threads of this process; none where the kernel does not list them."""
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def _is_running(pid: int) -> bool:
    """Whether a child runs, and has not ended without this process having waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
