"""Decision at a spike: the state to which a run returns, and the batches that it skips. This module does not import
torch.

Both follow from the number of the spike and the flags, and not from what a process happens to hold, so that a run that
is resumed or repeated decides the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Reaction of a run to a spike. Iterations are numbered as in the log."""

    spike: int
    to: int
    """Iteration after which the run continues."""

    first: int
    last: int
    """Iterations whose batches are skipped."""

    @property
    def passed_over(self) -> range:
        """Numbers of the skipped iterations."""
        return range(self.first, self.last + 1)


def decide(spike: int, steps: int, batches: int | None, interval: int, last_to: int = 0) -> Decision:
    """Decide at a spike: return to the newest multiple of `interval` that is at least `steps` earlier, but not before
    `last_to`, to which the run returned last. `batches` batches are skipped, the last of which is the spike's; if there
    are fewer since the state, batches after the spike are skipped too. None: all batches since the state."""
    to = max(0, last_to, (spike - steps) // interval * interval)
    count = spike - to if batches is None else batches
    first = max(to, spike - count) + 1
    return Decision(spike, to, first, first + count - 1)
