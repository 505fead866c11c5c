"""The state to which a run goes back at a spike, and the batches that it passes over. This module does not import
torch.

Both follow from the number of the spike and the flags, and not from what a process happens to hold: a run that is
resumed, or repeated, decides the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """What a run does at a spike. Iterations are numbered as in the log."""

    spike: int
    to: int
    """The iteration after which the run goes on."""

    first: int
    last: int
    """The iterations whose batches are passed over."""

    @property
    def passed_over(self) -> range:
        """Their numbers."""
        return range(self.first, self.last + 1)


def decide(spike: int, steps: int, batches: int | None, interval: int, last_to: int = 0) -> Decision:
    """The decision at a spike: back to the newest multiple of `interval` that is at least `steps` before it, but not
    before `last_to`, to which the run has gone back before. Passed over are `batches` that end with the spike; more
    than there are since the state go on after the spike. None: all since the state."""
    to = max(0, last_to, (spike - steps) // interval * interval)
    count = spike - to if batches is None else batches
    first = max(to, spike - count) + 1
    return Decision(spike, to, first, first + count - 1)
