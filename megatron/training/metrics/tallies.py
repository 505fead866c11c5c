"""Sums that modules add up in a step's forward passes, for the log: those of skipped steps do not count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Tallies:
    """Adds up the tallies of a rank's modules over the steps of a log interval.

    `tallies` are tensors of one shape that the modules add to. `counts` says whether this rank's count: tensor-parallel
    ranks have the same.
    """

    def __init__(self, tallies: Sequence[Tensor], rows: int, counts: bool, device: torch.device) -> None:
        self.tallies, self.counts = list(tallies), counts
        self.totals = torch.zeros(rows, 2, dtype=torch.float64, device=device)
        """Loss sum and tokens, by row, since the last record."""

    def end_step(self, skip: Tensor) -> None:
        """Adds the tally of a step to the totals, unless `skip` is 1."""
        for tally in self.tallies if self.counts else ():
            self.totals += torch.where(skip > 0, 0.0, tally)
        self.forget_step()

    def moved_by_end_step(self) -> list[Tensor]:
        return [*self.tallies, self.totals]

    def forget_step(self) -> None:
        """Drops what a step that will not be ended has tallied."""
        for tally in self.tallies:
            tally.zero_()

    def take(self) -> Tensor:
        """[rows * 2]: loss sums and tokens of this rank since the last call."""
        taken, self.totals = self.totals, torch.zeros_like(self.totals)
        return taken.flatten()


def means(summed: Tensor) -> list[float | None]:
    """Mean of each row of `take` summed over the world; None where no token counted."""
    return [total / count if count else None for total, count in summed.view(-1, 2).tolist()]
