"""Progress of long operations outside training steps: a tqdm bar on a terminal, plain lines in a log."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Protocol

SECONDS_BETWEEN_LINES = 30.0


class Bar(Protocol):
    """The part of the tqdm interface that this module uses."""

    n: int

    def update(self, n: float) -> object: ...

    def close(self) -> None: ...

    def set_postfix(self, *, loss: str) -> None: ...

    def write(self, s: str) -> None: ...


class ProgressBar:
    """Progress bar that shows how much of `total` is done. On a terminal, the progress is a tqdm bar. Otherwise, `say`
    is called with a line every 30 seconds, and short operations print nothing."""

    def __init__(
        self,
        what: str,
        total: int,
        unit: str,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.clock = clock
        self.say = say if say is not None else lambda line: print(line, file=sys.stderr, flush=True)
        self.began = self.last = clock()
        self._bar: Bar | None = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False, dynamic_ncols=True)

    def update(self, done: int) -> None:
        """Show that `done` of `total` units of work are complete."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif done and self.clock() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = self.clock()
            seconds = self.last - self.began
            left = seconds * max(0, self.total - done) / done
            self.say(f"{self.what}: {done / max(1, self.total):.0%} after {seconds:.0f} s, {left:.0f} s left")
        if done >= self.total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def bars(what: str, unit: str, say: Callable[[str], None] | None = None) -> Callable[[int, int], None]:
    """Return a function (done, total) that shows the progress of an operation. Calling the returned function with
    `done=0` begins the next operation."""
    shown: list[ProgressBar] = []

    def update(done: int, total: int) -> None:
        if done == 0 or not shown:
            shown[:] = [ProgressBar(what, total, unit, say)]
        shown[0].update(done)

    return update


def no_bar(done: int, total: int) -> None:
    """Show no progress. All ranks except the first use this function in place of a progress bar."""
