"""Ladder prediction: the target's loss, loss curve and best learning rate, each with its uncertainty."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.extensions.optim.mup.flags import MupFlags
from megatron.extensions.plan.ladder.best_rate import BestRate, rate_of_target
from megatron.extensions.plan.ladder.expectation import SCHEMA
from megatron.extensions.plan.ladder.law import DRAWS, Form, Law, Point, deviation, drawn, fit, form_of, interval
from megatron.extensions.plan.ladder.outcome import Outcome, of_law
from megatron.extensions.plan.ladder.rungs import Ladder

CURVE_DRAWS = 50
"""Number of bootstrap fits for each evaluation. Each bootstrap fit uses predicted losses with random noise."""

NORMAL = 1.645
"""Half-width, in standard deviations, of the central interval that contains 90 % of a normal distribution."""

TOO_WIDE = 0.05
"""Width of an interval, as a share of the loss, above which the interval is reported as too wide."""

NEAR = 1.05
"""Tolerance factor for the target's ratio of tokens to parameters. If this ratio lies outside the range of the rungs'
ratios by more than this factor, a law that depends on compute alone does not cover the target."""

FAR = 10
"""If the ratio of the target's compute to the largest rung's compute exceeds this number, the intervals are reported as
optimistic."""


@dataclass(frozen=True)
class Fitted:
    """Law fitted to measured losses, together with the laws of a bootstrap, which are fitted to predicted losses with
    random noise."""

    points: Sequence[Point]
    form: Form
    law: Law
    others: Sequence[Law]

    @classmethod
    def of(cls, points: Sequence[Point], form: Form, draws: int = DRAWS) -> Fitted:
        law = fit(points, form)
        return cls(points, form, law, drawn(points, law, form, draws))

    def at(self, point: Point) -> dict[str, float]:
        """Return the predicted loss of a point and the bounds of its uncertainty interval."""
        low, high = interval([law(point) for law in self.others])
        loss = self.law(point)
        return {"loss": loss, "low": min(low, loss), "high": max(high, loss)}

    def coefficients(self) -> dict[str, list[float]]:
        """Return a list [value, low, high] for each coefficient, keyed by the name of the coefficient."""
        values = [law.described() for law in self.others]
        return {
            name: [value, *interval([each[name] for each in values])] for name, value in self.law.described().items()
        }


def predict(ladder: Ladder, found: Sequence[Outcome], rates: Sequence[BestRate] = ()) -> dict[str, Any]:
    """Return the content of ladder.json. Raises ValueError if the ladder has finished runs of fewer than three sizes.

    Args:
        rates: Best learning rates of the swept sizes.
    """
    best = of_law(found, ladder.target.rate)
    size = ladder.target.size
    target = Point(size.parameters, size.tokens, math.nan)
    points = [each.point() for each in best]
    if len(points) < 3:
        few = f"{len(points)} finished runs: a law needs at least 3; run more rungs"
        raise ValueError("\n".join((few, *_left_out(found, best))))
    final = Fitted.of(points, form_of(points))
    transfers = ladder.config.options(MupFlags).use_mup
    return {
        "schema": SCHEMA,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": {
            "hidden_size": size.hidden_size,
            "num_layers": size.num_layers,
            "parameters": size.parameters,
            "iterations": size.iterations,
            "tokens": size.tokens,
            "batch_size": ladder.config.training.global_batch_size,
            "lr": ladder.target.rate,
        },
        "law": {
            "form": "E + A C^-a" if len(final.law.scales) == 1 else "E + A N^-a + B D^-b",
            **final.coefficients(),
            "noise": deviation(final.points, final.law, final.form),
        },
        "rungs": [{"name": each.rung.name, "loss": each.loss, "fitted": final.law(each.point())} for each in best],
        "predicted": final.at(target),
        "check": _check(final.points, final.form),
        "curve": _curve(ladder, best, target, final),
        "rate": _rate(rates, ladder, transfers),
        "unknown": [*_left_out(found, best), *_other_rate(ladder, best), *unknown(ladder, final, target, rates)],
    }


def _curve(ladder: Ladder, best: Sequence[Outcome], target: Point, final: Fitted) -> list[dict[str, float]]:
    """Predict the target's loss at each evaluation from the rungs' losses at the same evaluation. The laws for earlier
    evaluations are fitted with the exponents of the final law.

    Validation losses vary more while the learning rate is high. Therefore, the loss of the largest rung is also
    predicted from the other rungs at each evaluation. The largest relative error of these predictions, over the current
    and all later evaluations, is a lower bound on the relative standard deviation of the target's loss. If the target
    is farther from the largest rung, in log(compute), than the largest rung is from the second largest rung, the errors
    are multiplied by the ratio of these two distances.
    """
    form = Form(final.form.terms, final.law.exponents)
    curve: list[dict[str, float]] = []
    *_, before, largest = sorted(point.compute for point in final.points)
    reach = max(1.0, math.log(target.compute / largest) / math.log(largest / before))
    error = 0.0
    for number in range(ladder.evaluations, 0, -1):
        points = [each.point(number) for each in best if number in each.losses]
        last = number == ladder.evaluations
        found = (final if last or len(points) < 3 else Fitted.of(points, form, CURVE_DRAWS)).at(target)
        check = None if last else _check(points, form)
        error = max(error, abs(check["error"]) * reach if check is not None else 0.0)
        low, high = found["loss"] * (1 - NORMAL * error), found["loss"] * (1 + NORMAL * error)
        found |= {"low": min(low, found["low"]), "high": max(high, found["high"])}
        curve.insert(0, {"tokens": target.tokens * number / ladder.evaluations, **found})
    return curve


def _check(points: Sequence[Point], form: Form) -> dict[str, float] | None:
    """Predict the largest rung's loss from the other rungs; return None if there are fewer than three other rungs."""
    *others, last = sorted(points, key=lambda point: point.compute)
    if len(others) < 3:
        return None
    predicted = fit(others, form_of(others) if form.exponents is None else form)(last)
    return {"predicted": predicted, "measured": last.loss, "error": predicted / last.loss - 1}


def _rate(rates: Sequence[BestRate], ladder: Ladder, transfers: bool) -> dict[str, float] | None:
    found = rate_of_target(rates, ladder.target.size.parameters, transfers)
    return None if found is None else dict(zip(("best", "low", "high"), found, strict=True))


def _left_out(found: Sequence[Outcome], best: Sequence[Outcome]) -> Iterator[str]:
    """Yield one line for each reason why runs are not included in the law."""
    if diverged := [each.rung.name for each in found if each.diverged]:
        yield f"not included in the law, because they diverged: {', '.join(diverged)}"
    if unfinished := [each.rung.name for each in found if each.loss is None and not each.diverged]:
        yield f"not included in the law, because they have not finished: {', '.join(unfinished)}"
    sizes = {each.rung.size for each in best}
    alone = dict.fromkeys(each.rung.name for each in found if each.loss is not None and each.rung.size not in sizes)
    if alone:
        why = "their sizes have no run at the target's learning rate"
        yield f"not included in the law, because {why}: {', '.join(alone)}"


def _other_rate(ladder: Ladder, best: Sequence[Outcome]) -> Iterator[str]:
    """Yield a warning if the target's learning rate lies outside the range of the rungs' learning rates."""
    rates, own = [each.rung.rate for each in best], ladder.target.rate
    if not min(rates) <= own <= max(rates):
        told = f"{min(rates):g} to {max(rates):g}" if min(rates) < max(rates) else f"{rates[0]:g}"
        yield f"the law fits runs at learning rates of {told}, but the target has {own:g}: the law does not cover it"


def unknown(ladder: Ladder, final: Fitted, target: Point, rates: Sequence[BestRate]) -> Iterator[str]:
    """Yield one sentence for each source of uncertainty in the prediction."""
    points, law = final.points, final.law
    coefficients = final.form.coefficients
    if len(points) <= coefficients:
        yield f"the law has {coefficients} coefficients, but only {len(points)} runs: no run is left to check the law"
    times = target.compute / max(point.compute for point in points)
    if times > FAR:
        yield f"the target has {times:.0f} times the compute of the largest rung; intervals assume that the law holds"
    if len(law.scales) == 1:
        yield "the runs do not separate the effects of parameters and tokens: the law depends on compute alone"
        ratios = [point.tokens / point.parameters for point in points]
        ratio = target.tokens / target.parameters
        if not min(ratios) / NEAR <= ratio <= NEAR * max(ratios):
            told = f"{min(ratios):.3g} to {max(ratios):.3g}"
            rungs = f"but the rungs have {told}: the law does not cover it"
            yield f"the target has {ratio:.3g} tokens per parameter, {rungs}"
    found = final.at(target)
    if (width := (found["high"] - found["low"]) / found["loss"]) > TOO_WIDE:
        yield f"the interval of the loss is {width:.1%} wide: add larger rungs"
    floor = final.coefficients()["E"]
    if floor[1] < 0.05 * min(point.loss for point in points):
        yield f"the runs do not determine the irreducible loss E, which may be {floor[1]:.3g} to {floor[2]:.3g}"
    if not rates:
        yield "no size has finished runs at three learning rates or more: the best rate is unknown"
    for rate in rates:
        if not rate.bracketed:
            best = f"the best rate, {rate.rate:g}, is the first or last rate of the sweep"
            yield f"at {rate.parameters:,.0f} parameters {best}"
    if rates and not ladder.config.options(MupFlags).use_mup and sum(rate.bracketed for rate in rates) < 3:
        yield "without muP, the best rate has an interval only if three or more sizes are swept"


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the prediction as lines of text."""
    target, loss = found["target"], found["predicted"]
    law = found["law"]
    names = [name for name in law if name not in ("form", "noise")]
    values = ", ".join(f"{name} = {law[name][0]:.4g} ({law[name][1]:.4g} to {law[name][2]:.4g})" for name in names)
    yield f"law: L = {law['form']}, {values}"
    if (check := found["check"]) is not None:
        told = f"{check['predicted']:.4f} for the largest rung, whose measured loss is {check['measured']:.4f}"
        yield f"check: the other rungs predict {told} ({check['error']:+.2%})"
    what = f"{target['parameters']:,} parameters, {target['tokens']:,} tokens"
    yield f"predicted loss of {what}: {loss['loss']:.4f} ({loss['low']:.4f} to {loss['high']:.4f})"
    if (rate := found["rate"]) is not None:
        yield f"predicted best learning rate: {rate['best']:.3g} ({rate['low']:.3g} to {rate['high']:.3g})"
    yield from (f"not known: {each}" for each in found["unknown"])
