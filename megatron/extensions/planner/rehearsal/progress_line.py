"""A line on standard error that says how far a long command is: rewritten on a terminal, else printed now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

SECONDS_BETWEEN = 20.0
"""Between two lines where standard error is no terminal."""


class ProgressLine:
    """Counts steps of `total`: `7 of 22 ranks rehearsed, 12 s`."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self._terminal, self._began = sys.stderr.isatty(), time.monotonic()
        self._last = self._began

    def __enter__(self) -> ProgressLine:
        if self._terminal:
            self._print()
        return self

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        now = time.monotonic()
        if self._terminal or (now - self._last >= SECONDS_BETWEEN and self.done < self.total):
            self._last = now
            self._print()

    def _print(self) -> None:
        text = f"{self.done} of {self.total} {self.what}, {time.monotonic() - self._began:.0f} s"
        print(
            f"\r{text}\033[K" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
