"""Scaling laws for losses: L(N, D) = E + A N^-a + B D^-b (arXiv 2203.15556), fitted to finished runs. This module
requires SciPy.

As in the paper, the fit minimizes the Huber loss of the residuals in log(L), starting from many points. If all runs
have the same ratio of tokens to parameters, their losses cannot determine A and B separately. In this case, the fitted
law is L(C) = E + A C^-a, with the compute C = 6 N D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

HUBER = 1e-3
"""Difference in log(L) up to which the Huber loss is quadratic, as in section D.2 of arXiv 2203.15556."""

NOISE = 0.002
"""Lower bound on the relative standard deviation of losses, used for computing intervals. A different seed changes the
loss of a small model by about this share."""

DRAWS = 200
"""Number of bootstrap fits from which intervals are computed. Each bootstrap fit uses predicted losses with random
noise."""

SHARES = (0.05, 0.95)
"""Lower and upper bound of an interval, as quantiles over the bootstrap fits."""

EXPONENTS = (0.02, 2.0)
STARTS = (0.1, 0.25, 0.5)

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """Data point to which a scaling law is fitted: the size, the training length and the loss of a finished run."""

    parameters: float
    """Number of active parameters, N."""

    tokens: float
    """Number of training tokens, D."""

    loss: float

    @property
    def compute(self) -> float:
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class Law:
    """Fitted scaling law. `scales`, `exponents` and `units` contain one value for each term of the law."""

    floor: float
    """Irreducible loss (E)."""

    scales: tuple[float, ...]
    exponents: tuple[float, ...]
    units: tuple[float, ...]
    """Geometric mean of each variable over the points. The term A N^-a is computed as scale * (N / unit)^-exponent."""

    def __call__(self, point: Point) -> float:
        """Predict the loss of a point from its N and D; the measured loss of the point is ignored."""
        values = zip(self.scales, variables(point, len(self.scales)), self.units, self.exponents, strict=True)
        return self.floor + sum(scale * (x / unit) ** -exponent for scale, x, unit, exponent in values)

    def described(self) -> dict[str, float]:
        """Return the constants of the law, keyed by their names E, A and a, and also B and b if the law has a second
        term."""
        names = (("A", "a"), ("B", "b"))
        found = {"E": self.floor}
        for (scale, exponent), *values in zip(names, self.scales, self.exponents, self.units, strict=False):
            found |= {scale: values[0] * values[2] ** values[1], exponent: values[1]}
        return found


def variables(point: Point, terms: int) -> tuple[float, ...]:
    """Return the variables of a law's terms: (C,) for one term, or (N, D) for two terms."""
    return (point.compute,) if terms == 1 else (point.parameters, point.tokens)


@dataclass(frozen=True)
class Form:
    """Form of a scaling law: its number of terms and, if they are not fitted, its exponents."""

    terms: int
    """Number of terms of the law: 1 (a term in the compute C) or 2 (a term in the parameters N and a term in the tokens
    D)."""

    exponents: tuple[float, ...] | None = None
    """Fixed exponents of the law; None if the exponents are fitted."""

    @property
    def coefficients(self) -> int:
        """Number of coefficients that a fit determines."""
        return 1 + self.terms * (1 if self.exponents else 2)


def form_of(points: Sequence[Point]) -> Form:
    """Choose a law with one term or a law with two terms. The law has two terms only if the points separate the effect
    of N from the effect of D, and if there are more than five points, because this law has five coefficients."""
    logs = np.log([[point.parameters, point.tokens] for point in points])
    spread = np.linalg.svd(logs - logs.mean(0), compute_uv=False)
    return Form(2 if len(points) > 5 and spread[1] > 0.1 * spread[0] else 1)


def fit(points: Sequence[Point], form: Form | None = None, start: Law | None = None) -> Law:
    """Fit the law by minimizing the Huber loss. Raises ValueError if there are fewer than three points, or if scipy is
    not installed.

    Args:
        start: Law whose constants the fit starts from. Pass a law if the losses differ from its predictions only by
            noise. By default, the fit is repeated from many starting points.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise ValueError("fitting a law needs scipy: pip install 'paritrain[ladder]'") from None
    if len(points) < 3:
        raise ValueError(f"{len(points)} finished runs: a law needs at least 3; run more rungs")
    form = form or form_of(points)
    terms = form.terms
    given = np.array([variables(point, terms) for point in points])
    units = np.exp(np.log(given).mean(0))
    logs, losses = np.log(given / units), np.array([point.loss for point in points])

    def differences(values: Numbers) -> Numbers:
        scales, exponents = values[1 : 1 + terms], values[1 + terms :]
        found: Numbers = np.log(values[0] + (scales * np.exp(-exponents * logs)).sum(1)) - np.log(losses)
        return found

    least, most = ([bound] * terms for bound in EXPONENTS)
    if form.exponents is not None:
        least, most = ([exponent + shift for exponent in form.exponents] for shift in (-1e-7, 1e-7))
    lowest = np.array([0.0, *[1e-9] * terms, *least])
    highest = np.array([float(losses.min()), *[float(10 * losses.max())] * terms, *most])
    found = []
    for values in _starts(losses, terms) if start is None else [[start.floor, *start.scales, *start.exponents]]:
        begin = np.clip(values, lowest + 1e-9, highest - 1e-9)
        found.append(least_squares(differences, begin, bounds=(lowest, highest), loss="huber", f_scale=HUBER))
    best = [float(value) for value in min(found, key=lambda each: each.cost).x]
    return Law(best[0], tuple(best[1 : 1 + terms]), tuple(best[1 + terms :]), tuple(map(float, units)))


def _starts(losses: Numbers, terms: int) -> list[list[float]]:
    middle = float(losses.mean())
    floors = [share * float(losses.min()) for share in (0.1, 0.5, 0.9)]
    return [
        [floor, *[(middle - floor) / terms] * terms, *exponents]
        for floor, *exponents in product(floors, *[STARTS] * terms)
    ]


def deviation(points: Sequence[Point], law: Law, form: Form) -> float:
    """Return the relative standard deviation of the measured losses from the losses that a law predicts. The result is
    at least `NOISE`."""
    squares = [float(np.log(point.loss / law(point))) ** 2 for point in points]
    freedom = len(points) - form.coefficients
    return max(NOISE, (sum(squares) / freedom) ** 0.5) if freedom > 0 else NOISE


def drawn(points: Sequence[Point], law: Law, form: Form, draws: int = DRAWS) -> list[Law]:
    """Add random noise to the predictions of a fitted law, and fit further laws to the results. This parametric
    bootstrap is used because there are too few points for resampling."""
    random, spread = np.random.default_rng(1), deviation(points, law, form)
    found = []
    for noise in random.normal(0.0, spread, (draws, len(points))):
        changed = [
            Point(point.parameters, point.tokens, law(point) * float(np.exp(each)))
            for point, each in zip(points, noise, strict=True)
        ]
        found.append(fit(changed, form, law))
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper bound of an interval: the quantiles of the values for the shares in `SHARES`."""
    low, high = np.quantile(values, SHARES)
    return float(low), float(high)
