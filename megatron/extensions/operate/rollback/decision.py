"""Choice of the state that a run returns to after a loss spike, and of the batches that it then skips. This module does
not import torch.

The decision depends only on the iteration of the spike, the flags and earlier rollbacks, and not on the states that a
process has kept. A resumed or repeated run therefore makes the same decision.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """State that a run returns to after a loss spike, and the batches to skip. Iterations are numbered as in the
    log."""

    spike: int
    to: int
    """Last iteration whose result is kept: the run returns to the state after this iteration."""

    first: int
    last: int
    """Last iteration whose batch is skipped. `first` is the first iteration whose batch is skipped."""

    @property
    def passed_over(self) -> range:
        """Return the skipped iterations."""
        return range(self.first, self.last + 1)


def decide(spike: int, steps: int, batches: int | None, interval: int, last_to: int = 0) -> Decision:
    """Choose the state that a run returns to after a loss spike, and the batches to skip.

    Args:
        spike: Iteration with the loss spike.
        steps: Minimum number of steps that the run goes back.
        batches: Number of batches to skip. If the run goes back at least `batches` steps, the last skipped batch is the
            batch of the spike. Otherwise, the run skips every batch between the restored state and the spike, and then
            further batches after the spike until `batches` batches are skipped. Pass None to skip only the batches
            between the restored state and the spike.
        interval: Number of iterations between the states that the run keeps. The run returns to an iteration that is a
            multiple of `interval`.
        last_to: Iteration that the last rollback returned to; 0 if there was none. The run does not return to an
            iteration before `last_to`.
    """
    to = max(0, last_to, (spike - steps) // interval * interval)
    count = spike - to if batches is None else batches
    first = max(to, spike - count) + 1
    return Decision(spike, to, first, first + count - 1)
