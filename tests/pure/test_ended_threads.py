"""Test that a joined Python thread counts as ended only after its kernel thread has also ended."""

from __future__ import annotations

import threading
from pathlib import Path

from megatron.training.reliability.child_processes import wait_until_gone


def test_a_joined_thread_has_ended_in_the_kernel() -> None:
    for _ in range(50):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        assert wait_until_gone(thread, 60.0)
        assert not Path(f"/proc/self/task/{thread.native_id}").exists()


def test_a_running_thread_is_reported() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    try:
        assert not wait_until_gone(thread, 0.01)
    finally:
        ends.set()
        thread.join()
