"""What this rank is doing: phase of the run, line of code, last collectives. Read when a rank fails."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

from megatron.training.reliability.failure_report import place_in, place_of, raised_in_message
from megatron.training.reliability.flight_recorder import Entered, Group, last_entered, traces
from megatron.training.reliability.hang_analysis import Standing


class RankStatus:
    """Written by the training thread, read by the watchdog's. Create it on the thread that trains."""

    def __init__(self) -> None:
        self.phase = "start-up"
        self.limit = ""
        """The flag, with its value, that limits how long ranks wait for one another in this phase."""

        self.executor: Any = None
        """Has the running action as `.current`, and the rank whose message it waits for as `.message_from`."""

        self.groups: dict[str, Group] = {}
        """The process groups, once they exist."""

        self.meeting: Entered | None = None
        """The last meeting of all ranks at start-up."""

        self.error: BaseException | None = None
        """The exception that ends this rank."""

        self._thread = threading.get_ident()

    def phase_and_action(self) -> str:
        """Phase, and within a step the micro-batch and the action of the schedule."""
        action = getattr(self.executor, "current", None)
        return self.phase if action is None else f"{self.phase}, micro-batch {action.microbatch}, action {action}"

    def line(self) -> str:
        """The line of code that raised the error, or that the training thread is in."""
        return (place_in(self.error) if self.error is not None else "") or place_of(self._thread)

    def place(self) -> str:
        """Phase and line of code."""
        return f"{self.phase_and_action()}, {self.line()}"

    def standing(self) -> Standing:
        """Everything that `hang_analysis` needs to know of this rank."""
        if self.error is not None:
            frames = traceback.extract_tb(self.error.__traceback__)
        else:
            frames = traceback.extract_stack(sys._current_frames().get(self._thread))
        last_pending = self.error is not None and not raised_in_message(self.error)
        entered = last_entered(traces(), self.groups, last_pending) if self.groups else []
        if self.meeting is not None:
            entered.append(self.meeting)
        stack, waits_for = "".join(traceback.format_list(frames)), getattr(self.executor, "message_from", None)
        return Standing(self.phase_and_action(), self.line(), stack, tuple(entered), waits_for)
