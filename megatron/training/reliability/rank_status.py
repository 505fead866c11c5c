"""Status of this rank for failure reports: phase of the run, line of code, and the ranks for which this rank waits."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.core.parallel_state import ParallelState
from megatron.training.reliability.failure_report import place_in, place_of
from megatron.training.reliability.untrusted import parse_record


@dataclass(frozen=True)
class Standing:
    """Activity of a rank when the run failed: the phase and the line of code."""

    phase: str
    place: str
    """Line of code."""

    stack: str = ""
    evidence: object = None
    """Data that the rank provides for a hang analysis, in JSON types."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Standing:
        """Parse the JSON of a `Standing`. Raises ValueError if the text is not valid."""
        return parse_record(cls, text)


@dataclass(frozen=True)
class Blame:
    """Ranks that block the other ranks, and a line that says what the blocking ranks did."""

    ranks: tuple[int, ...]
    title: str
    why: str


@dataclass(frozen=True)
class Meeting:
    """Numbered point during start-up at which all ranks wait for each other."""

    ranks: tuple[int, ...]
    number: int
    what: str
    """Name of the start-up phase that ends here."""

    pending: bool = True


class HangAnalysis:
    """Base class of the hang analyses that callbacks provide. The base class itself finds nothing."""

    def __init__(self, status: RankStatus) -> None:
        self.status = status

    def evidence(self) -> object:
        """Return this rank's evidence for the analysis, in JSON types. The rank that writes the report passes the
        evidence of all ranks to `blame`."""
        return None

    def blame(self, standings: Mapping[int, Standing]) -> Blame | None:
        """Return the ranks that block the others, or None if the phases and lines of code in `standings` do not reveal
        them."""
        return None

    def write(self, folder: Path, rank: int) -> None:
        """Write further evidence into `folder`, which contains the stack file of `rank`. The method may raise
        OSError."""


class RankStatus:
    """Status of this rank, written by the training thread and read by the watchdog's thread. The constructor must be
    called on the training thread."""

    def __init__(self) -> None:
        self.phase = "start-up"
        self.limit = ""
        """Flag, with its value, that limits how long ranks wait for each other in this phase."""

        self.executor: object = None
        """Pipeline schedule executor. The executor's attribute `current` is the running action, and `message_from` is
        the rank from which the executor awaits a message."""

        self.state: ParallelState | None = None
        """Process groups, or None until they exist."""

        self.meeting: Meeting | None = None
        """Most recent start-up meeting of all ranks."""

        self.error: BaseException | None = None
        """Exception that ends this rank."""

        self.analysis = HangAnalysis(self)
        self._thread = threading.get_ident()

    def phase_and_action(self) -> str:
        """Return the phase of the run. During the passes of a step, the text also contains the micro-batch and the
        running action of the pipeline schedule."""
        action = getattr(self.executor, "current", None)
        return self.phase if action is None else f"{self.phase}, micro-batch {action.microbatch}, action {action}"

    def line(self) -> str:
        """Return the line of code that raised the error. If there is no error, return the line that the training thread
        executes."""
        return (place_in(self.error) if self.error is not None else "") or place_of(self._thread)

    def place(self) -> str:
        """Return the phase of the run and the line of code that this rank executes."""
        return f"{self.phase_and_action()}, {self.line()}"

    def standing(self) -> Standing:
        """Return what this rank is doing, so that another rank can report it."""
        if self.error is not None:
            frames = traceback.extract_tb(self.error.__traceback__)
        else:
            frames = traceback.extract_stack(sys._current_frames().get(self._thread))
        stack = "".join(traceback.format_list(frames))
        return Standing(self.phase_and_action(), self.line(), stack, self.analysis.evidence())
