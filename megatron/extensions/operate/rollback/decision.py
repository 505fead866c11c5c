"""Decision at a spike: the state that a run returns to, and the batches to skip. This module does not import torch.

The decision depends only on the iteration of the spike and the flags. The states that a process holds do not matter, so
that a resumed or repeated run makes the same decision.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Decision on the reaction of a run to a spike. Iterations are numbered as in the log."""

    spike: int
    to: int
    """Iteration to whose state the run returns."""

    first: int
    last: int
    """Last iteration whose batch is skipped. `first` is the first iteration whose batch is skipped."""

    @property
    def passed_over(self) -> range:
        """Return the skipped iterations."""
        return range(self.first, self.last + 1)


def decide(spike: int, steps: int, batches: int | None, interval: int, last_to: int = 0) -> Decision:
    """Decide on the reaction to a spike.

    Args:
        spike: Iteration of the spike.
        steps: Minimum number of steps to go back.
        batches: Number of batches to skip, ending with the spike's batch. If the run goes back fewer steps, batches
            after the spike are also skipped. None skips all batches between the state that the run returns to and the
            spike.
        interval: Interval in iterations between kept states. The run returns to a multiple of this interval.
        last_to: Iteration that the run returned to at the last rollback. The run does not go back beyond this
            iteration.
    """
    to = max(0, last_to, (spike - steps) // interval * interval)
    count = spike - to if batches is None else batches
    first = max(to, spike - count) + 1
    return Decision(spike, to, first, first + count - 1)
