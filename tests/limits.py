"""Time limits for everything that a test waits for.

A limit ends a hang and never judges speed: it is far above the time that a slow, busy machine needs. Tests that are
expected to wait (for a timeout of the product) use a short timeout of the product instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

HANG = 600.0
"""Seconds that a test waits for a process, a file or a line of output."""


def wait_for(condition: Callable[[], Any], ranks: Sequence[Any] = (), screen: Callable[[], str] = lambda: "") -> Any:
    """Return the value of `condition()` as soon as it is true. Asserts that this happens within `HANG` seconds and that
    the processes `ranks`, which print to `screen()`, run until then."""
    limit = time.monotonic() + HANG
    while not (found := condition()):
        assert time.monotonic() < limit and all(rank.is_alive() for rank in ranks), screen()
        time.sleep(0.02)
    return found
