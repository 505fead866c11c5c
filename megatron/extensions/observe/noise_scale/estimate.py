"""Estimate of the gradient noise scale from the gradient norms of small and large batches. This module does not import
torch.

The simple noise scale is tr(S) / |G|^2, with G the gradient of the expected loss and S the covariance of one sample's
gradient. The squared norm of a mean gradient over B samples has the expectation |G|^2 + tr(S) / B, so two batch sizes
give unbiased estimates of both terms (McCandlish et al., arXiv 1812.06162, appendix A.1):

    tr(S) = (|G_small|^2 - |G_large|^2) / (1 / B_small - 1 / B_large)
    |G|^2 = (B_large |G_large|^2 - B_small |G_small|^2) / (B_large - B_small)

Their ratio in a single step is meaningless. Both are averaged over many steps before the ratio is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

BLOCKS = 20
"""Maximum number of step blocks in the jackknife, which omits one at a time."""

NORMAL_95 = 1.96
"""Standard errors on each side of a 95% interval."""


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of a step's squared norms in an estimate, for the small and the large batch."""

    small: float
    large: float

    @classmethod
    def of_noise(cls, small: float, large: float) -> Coefficients:
        """Return the coefficients for tr(S); arguments are numbers of samples."""
        return cls(1 / (1 / small - 1 / large), -1 / (1 / small - 1 / large))

    @classmethod
    def of_signal(cls, small: float, large: float) -> Coefficients:
        """Return the coefficients for |G|^2; arguments are numbers of samples."""
        return cls(-small / (large - small), large / (large - small))


@dataclass(frozen=True)
class Estimate:
    """The noise scale in samples, and its 95% interval."""

    scale: float
    low: float
    high: float


class Window:
    """Estimates of tr(S) and |G|^2 in the latest steps."""

    def __init__(self, steps: int) -> None:
        self.rows: deque[tuple[float, float]] = deque(maxlen=steps)

    def add(self, rows: Iterable[Sequence[float]]) -> None:
        """Add [tr(S), |G|^2] of steps. A step without an update, which has two zeros, does not count."""
        self.rows.extend((noise, signal) for noise, signal in rows if noise or signal)

    def estimate(self) -> Estimate | None:
        """Return the ratio of the means, and its interval from a jackknife over blocks of steps.

        Returns None if noise hides the gradient, or with fewer than two steps.
        """
        rows = list(self.rows)
        count = min(BLOCKS, len(rows))
        noise, signal = (sum(row[side] for row in rows) for side in (0, 1))
        if count < 2 or signal <= 0 or noise <= 0:
            return None
        blocks = [rows[len(rows) * k // count : len(rows) * (k + 1) // count] for k in range(count)]
        without = []
        for block in blocks:
            left = signal - sum(row[1] for row in block)
            if left <= 0:
                return None
            without.append((noise - sum(row[0] for row in block)) / left)
        mean = sum(without) / count
        error = NORMAL_95 * sqrt((count - 1) / count * sum((each - mean) ** 2 for each in without))
        return Estimate(noise / signal, max(0.0, noise / signal - error), noise / signal + error)
