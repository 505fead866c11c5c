"""Estimate of the gradient noise scale from the gradient norms of small and large batches. This module does not import
torch.

The simple noise scale is tr(S) / |G|^2. G is the gradient of the expected loss, and S is the covariance of the gradient
of a single sample. The expectation of the squared norm of the mean gradient over B samples is |G|^2 + tr(S) / B.
Therefore, two batch sizes yield unbiased estimates of both terms (McCandlish et al., arXiv 1812.06162, appendix A.1):

    tr(S) = (|G_small|^2 - |G_large|^2) / (1 / B_small - 1 / B_large)
    |G|^2 = (B_large |G_large|^2 - B_small |G_small|^2) / (B_large - B_small)

The ratio of the two estimates from a single step is meaningless. Therefore, the estimates of tr(S) and |G|^2 are
averaged over many steps before their ratio is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

BLOCKS = 20
"""Maximum number of blocks into which the jackknife divides the steps. The jackknife omits one block at a time."""

NORMAL_95 = 1.96
"""Half of the width of a normal distribution's 95% interval, in standard errors."""


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of an estimate that is a linear combination of two squared gradient norms: |G_small|^2 of the small
    batch, and |G_large|^2 of the large batch."""

    small: float
    large: float

    @classmethod
    def of_noise(cls, small: float, large: float) -> Coefficients:
        """Return the coefficients of the estimate of tr(S), given the two batch sizes in samples."""
        return cls(1 / (1 / small - 1 / large), -1 / (1 / small - 1 / large))

    @classmethod
    def of_signal(cls, small: float, large: float) -> Coefficients:
        """Return the coefficients of the estimate of |G|^2, given the two batch sizes in samples."""
        return cls(-small / (large - small), large / (large - small))


@dataclass(frozen=True)
class Estimate:
    """Noise scale in samples, with the bounds of its 95% interval."""

    scale: float
    low: float
    high: float


class Window:
    """Sliding window over the latest steps. For each of these steps, the window contains an estimate of the gradient
    noise tr(S) and an estimate of the squared gradient norm |G|^2."""

    def __init__(self, steps: int) -> None:
        self.rows: deque[tuple[float, float]] = deque(maxlen=steps)

    def add(self, rows: Iterable[Sequence[float]]) -> None:
        """Add one row [tr(S), |G|^2] for each new step. Rows of steps without an update, which are zeros, are
        ignored."""
        self.rows.extend((noise, signal) for noise, signal in rows if noise or signal)

    def estimate(self) -> Estimate | None:
        """Return the noise scale and its confidence interval. The noise scale is the mean estimate of tr(S), divided by
        the mean estimate of |G|^2. The interval is computed with a jackknife over blocks of steps. Return None if
        there are fewer than two steps or if the noise is too large for an estimate.
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
