"""Find the best learning rate of each swept model size, and extrapolate the rate to a larger size.

This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class BestRate:
    """Learning rate with the lowest loss for one model size."""

    parameters: float
    rate: float
    bracketed: bool
    """True if the sweep contains a higher and a lower rate with higher losses; False if the best rate is the first or
    last rate of the sweep."""


def rate_of_target(found: Sequence[BestRate], parameters: float, transfers: bool) -> tuple[float, float, float] | None:
    """Return the best learning rate for a model with N `parameters`, as a tuple (rate, lowest, highest). Return None if
    no size has a bracketed rate (see `BestRate.bracketed`).

    If `transfers` is True, as with muP, the best rate is assumed to be the same for all sizes. In this case, the result
    consists of the geometric mean and the range of the bracketed rates. Without muP, the rate is extrapolated with a
    power law in the number of parameters. The range covers this fit, and additional fits that each leave out one size.
    If only one size has a bracketed rate, this rate is returned."""
    known = [each for each in found if each.bracketed]
    if not known:
        return None
    rates = [each.rate for each in known]
    if transfers or len(known) < 2:
        return math.exp(fmean(map(math.log, rates))), min(rates), max(rates)
    subsets = [known[:number] + known[number + 1 :] for number in range(len(known))] if len(known) > 2 else []
    laws = [_extrapolated(known, parameters), *(_extrapolated(some, parameters) for some in subsets)]
    return laws[0], min(laws), max(laws)


def _extrapolated(known: Sequence[BestRate], parameters: float) -> float:
    x = [math.log(each.parameters) for each in known]
    y = [math.log(each.rate) for each in known]
    spread = sum((one - fmean(x)) ** 2 for one in x)
    slope = sum((one - fmean(x)) * (two - fmean(y)) for one, two in zip(x, y, strict=True)) / spread if spread else 0.0
    return math.exp(fmean(y) + slope * (math.log(parameters) - fmean(x)))
