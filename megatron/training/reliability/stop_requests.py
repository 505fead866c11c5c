"""Requests to stop or save the run, carried out by all ranks after the same step.

A signal, a time limit or a file on any one rank becomes a request in the rank store. Each rank answers with the number
of ticks it has begun (a tick is a step, or one batch of an evaluation; all ranks make the same ones) and begins no
other one until the agreed tick is known: the highest answer. So all ranks stop after the same tick. As long as there is
no request, a tick costs the test of a flag: no collective, and no wait for the device.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.training.reliability.rank_store import Board, Request

UNANSWERED = 5.0
"""Seconds after a signal before the first step, after which this rank no longer waits for answers of the others."""


class StopRequests:
    """Holds one request at a time. `tick` and `done` are for the training thread, `ask` and `look` for the watchdog."""

    def __init__(self) -> None:
        self.request: Request | None = None
        """The request to carry out now: it is agreed, and all ticks before it are made."""

        self._ticks, self._number = 0, 0
        self._asked: Request | None = None
        self._after: int | None = None
        self._wishes: list[Request] = []
        self._change = threading.Condition()

    @property
    def pending(self) -> bool:
        """Whether there is a request that is not carried out yet."""
        return self._asked is not None

    @property
    def stopping(self) -> bool:
        """Whether the run is to stop now."""
        return self.request is not None and self.request.kind != "save"

    @property
    def resumes(self) -> bool:
        """Whether the run was cut short and is to be started again."""
        return self.request is not None and self.request.kind == "resume"

    @property
    def why(self) -> str:
        return self.request.why if self.request is not None else ""

    def tick(self, save_later: bool = False) -> bool:
        """Begins a tick. Returns False, and begins none, if a request is due first: it is then in `request`. With
        `save_later` only a request to stop is due."""
        with self._change:
            while self._asked is not None:
                if self._after is not None:
                    if self._ticks < self._after or (save_later and self._asked.kind == "save"):
                        break
                    self.request = self._asked
                    return False
                self._change.wait()
            self._ticks += 1
            return True

    def done(self) -> None:
        """Ends the present request, so that the next one can come."""
        with self._change:
            self.request = self._asked = self._after = None
            self._number += 1

    def ask(self, request: Request) -> None:
        """Adds a wish of this rank."""
        if request not in self._wishes:
            self._wishes.append(request)

    def look(self, board: Board, signal_at: float | None) -> str | None:
        """Exchanges requests and answers with the other ranks. `signal_at`: monotonic time of this rank's first signal.

        Returns why the run is to end at once, if that is before its first step, so that there is nothing to save.
        """
        if self._asked is None:
            if self._wishes:
                board.ask(self._number, self._wishes[0])
            request = board.asked(self._number)
            if request is not None:
                if request in self._wishes:
                    self._wishes.remove(request)
                with self._change:
                    self._asked = request
                    board.say(f"at/{self._number}", str(self._ticks))
        if self._asked is not None and self._after is None:
            after = board.agreed(self._number)
            if after == 0 and self._asked.kind == "resume":
                return f"ending before the first step: {self._asked.why}"
            with self._change:
                self._after = after
                self._change.notify_all()
            if after is None and self._ticks == 0 and signal_at and time.monotonic() - signal_at > UNANSWERED:
                return "ending though not all ranks have come up"
        return None


TRIGGERS = {"save": "save", "exit": "stop"}
"""Name of a file -> kind of the request that it makes."""


class StopConditions:
    """Deadlines, and the files `save` and `exit` in the folders of --save and --trigger-path. Rank 0 looks for them."""

    def __init__(
        self, deadlines: Mapping[str, tuple[float, str]], folders: Sequence[Path], kill_switch: Path | None = None
    ) -> None:
        """`deadlines`: what ends -> (`time.time()` of its end, kind of the request). `folders`: where the files are
        looked for. `kill_switch`: a file that stops the run as long as it exists."""
        self._deadlines, self._folders, self._kill_switch = deadlines, folders, kill_switch
        self._stuck = set[Path]()
        """Files that could not be removed."""

    def due(self) -> Iterator[Request]:
        """The requests that are due now. The files `save` and `exit` are removed when they are seen."""
        for why, (when, kind) in self._deadlines.items():
            if time.time() >= when:
                yield Request(kind, why)
        if self._kill_switch is not None and self._kill_switch.exists():
            yield Request("stop", f"--kill-switch-path {self._kill_switch} exists")
        for path, kind in ((folder / name, kind) for folder in self._folders for name, kind in TRIGGERS.items()):
            try:
                if path.is_file():
                    path.unlink()
                    yield Request(kind, f"{path} was there")
            except OSError as error:  # the watchdog's thread has to live on: it also listens to signals
                if path not in self._stuck:
                    print(f"{path} is ignored, as it cannot be removed: {error}", file=sys.stderr, flush=True)
                self._stuck.add(path)
