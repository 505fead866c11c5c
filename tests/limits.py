"""Time limits for all operations that tests wait for.

The limits only end tests that hang. No test fails because it is slow. Each limit is far above the time that a slow,
busy machine needs. Tests that must wait for a timeout of the library set that timeout to a short time instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

HANG = 600.0
"""Seconds that a test waits for a process, a file or a line of output before it fails."""


def wait_for(condition: Callable[[], Any], ranks: Sequence[Any] = (), screen: Callable[[], str] = lambda: "") -> Any:
    """Return the value of `condition()` as soon as it is true. Assert that `condition()` becomes true within `HANG`
    seconds and that the processes `ranks` do not exit before then. `screen()` returns the output of these processes."""
    limit = time.monotonic() + HANG
    while not (found := condition()):
        assert time.monotonic() < limit and all(rank.is_alive() for rank in ranks), screen()
        time.sleep(0.02)
    return found
