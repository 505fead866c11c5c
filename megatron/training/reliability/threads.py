"""End of threads, for processes that fork afterwards."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def wait_until_gone(thread: threading.Thread, seconds: float) -> bool:
    """Wait until the kernel has ended a thread that has run, and return whether it did within `seconds`.

    Python reports a thread as ended a moment earlier, while glibc still frees the thread's data under locks, such as
    the lock of the name resolver. A fork at that moment would copy a locked lock but not the thread that unlocks it, so
    the child would wait for the lock forever.
    """
    task, deadline = Path(f"/proc/self/task/{thread.native_id}"), time.monotonic() + seconds
    while task.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0)
    return True
