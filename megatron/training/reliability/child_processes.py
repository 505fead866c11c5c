"""End child processes when a rank ends, and wait for threads to end before a fork. This module does not import torch.

Extensions end their child processes in `on_end`. If the run fails, `on_end` is not called, and this module ends the
child processes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

GRACE = 0.5
"""Seconds to wait after SIGTERM before sending SIGKILL."""

DAEMON_GRACE = 5.0
"""Maximum number of seconds between SIGTERM and the end of a daemonic child process. A rank that ends normally sends
SIGTERM to these processes."""


def end_daemons(grace: float = DAEMON_GRACE) -> None:
    """End daemonic multiprocessing processes. Without this function, Python would send SIGTERM to these processes and
    then wait for them without a time limit. The function prints a line for each process that must be killed."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:  # without this module, there are no daemonic child processes
        return
    # In a forked process, `active_children` also returns the parent's children.
    own = [each for each in multiprocessing.active_children() if getattr(each, "_parent_pid", None) == os.getpid()]
    daemons = [child for child in own if child.daemon]
    for child in daemons:
        child.terminate()
    limit = time.monotonic() + grace
    for child in daemons:
        child.join(max(0.0, limit - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join(grace)  # a process in uninterruptible sleep may outlive SIGKILL
            told = f"process {child.pid} ({child.name}), a daemonic child, ignored SIGTERM for {grace:g} s"
            print(f"{told}: killed; an extension ends its processes in on_end", file=sys.stderr, flush=True)


def end_children() -> None:
    """End the child processes of this process. Child processes in another session keep running, because their creator
    detached them deliberately."""
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
    """Return the child processes of all threads of this process, or an empty list if the kernel does not list them."""
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def _is_running(pid: int) -> bool:
    """Return True if a child is running and is not a zombie."""
    return process_state(pid) not in ("", "Z", "X")


def process_state(pid: int) -> str:
    """Return the state of a process as Linux reports it, such as `R` or `S`. The state is `T` if a signal has stopped
    the process, and empty if the process is gone."""
    return process_stat(pid)[0]


def process_stat(pid: int) -> tuple[str, str]:
    """Return the state of a process and its start time in clock ticks since boot. Both values are empty if the process
    does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def own_start_time() -> float:
    """Return the time at which this process started, in seconds since boot. Raises ValueError if the system does not
    provide the start time."""
    return int(process_stat(os.getpid())[1]) / os.sysconf("SC_CLK_TCK")


def wait_until_gone(thread: threading.Thread, seconds: float) -> bool:
    """Wait until the operating-system thread of `thread` has ended, after its Python code has finished. Return True if
    the thread ended within `seconds`.

    When Python reports that a thread has ended, glibc may still be freeing the thread's data while it holds a lock,
    such as the lock of the name resolver. A process that is forked at this moment would inherit the held lock but not
    the thread that releases it, so the child would wait for the lock forever.
    """
    task, deadline = Path(f"/proc/self/task/{thread.native_id}"), time.monotonic() + seconds
    while task.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0)
    return True
