"""Decision at a spike: the state to which a run returns, and the batches to skip. This module does not import torch.

Both depend only on the iteration of the spike and the flags, and not on the states that a process holds, so that a
resumed or repeated run makes the same decision.
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
    """Last iteration whose batch is skipped; `first` is the first one."""

    @property
    def passed_over(self) -> range:
        """Return the skipped iterations."""
        return range(self.first, self.last + 1)


def decide(spike: int, steps: int, batches: int | None, interval: int, last_to: int = 0) -> Decision:
    """Decide on the reaction to a spike.

    Args:
        spike: Iteration of the spike.
        steps: Smallest number of steps to go back.
        batches: Number of batches to skip, ending with the spike's batch. If the run goes back fewer steps, batches
            after the spike are skipped too. None: all batches since the state.
        interval: The run returns to a multiple of this iteration interval.
        last_to: Iteration of the previous return; the run does not go back beyond it."""
    to = max(0, last_to, (spike - steps) // interval * interval)
    count = spike - to if batches is None else batches
    first = max(to, spike - count) + 1
    return Decision(spike, to, first, first + count - 1)
