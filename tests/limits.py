"""Limits of time for whatever a test waits for.

A limit is there to end a hang, never to judge speed: it lies far above what a slow machine with other work takes. Tests
that are expected to wait (for a timeout of the product) use a short timeout of the product instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

HANG = 600.0
"""Seconds that a test waits for a process, a file or a line of output."""


def wait_for(condition: Callable[[], Any], ranks: Sequence[Any] = (), screen: Callable[[], str] = lambda: "") -> Any:
    """The value of `condition()` as soon as it is true. Asserts that this is not later than `HANG`, and that the
    processes `ranks`, which print to `screen()`, run until then."""
    limit = time.monotonic() + HANG
    while not (found := condition()):
        assert time.monotonic() < limit and all(rank.is_alive() for rank in ranks), screen()
        time.sleep(0.02)
    return found
