"""The best learning rate of sizes that were swept, and of a larger one. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class BestRate:
    """The rate with the lowest loss of a size."""

    parameters: float
    rate: float
    bracketed: bool
    """True if higher and lower rates were worse. Otherwise it is the first or the last one that was tried."""


def rate_of_target(found: Sequence[BestRate], parameters: float, transfers: bool) -> tuple[float, float, float] | None:
    """(rate, lowest, highest) for a model of N `parameters`; None without a size.

    With muP the rate `transfers`: the geometric mean of those of the sizes, and their range. Without it, the power law
    of the parameters, and the range of such laws when each size is left out; for one size its rate."""
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
