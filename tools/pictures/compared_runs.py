"""Sections of a page that compares several runs: a ranking, curves over tokens, time and FLOPs, and differing flags."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from .drawing import Series, curves, short_number
from .report_sections import COLOURS_OF_RUNS, figures, html, names_of, status
from .run_folder import RunFolder, number

if TYPE_CHECKING:
    from markupsafe import Markup

Points = Sequence[tuple[float, float]]
AXES = {"tokens": "tokens", "hours": "hours of training", "FLOPs": "FLOPs of the model"}


def by_loss(runs: Sequence[RunFolder]) -> tuple[list[RunFolder], str]:
    """Return the runs in order of increasing loss, and the name of the loss. The loss is the last validation loss if
    all runs have one, otherwise the last training loss. Runs without a finite loss come last."""
    key = "valid_loss" if all(run.values("valid_loss") for run in runs) else "lm_loss"
    kind = "validation" if key == "valid_loss" else "training"
    return sorted(runs, key=lambda run: _last(run, key)), f"last {kind} loss"


def _last(run: RunFolder, key: str) -> float:
    """Return the last finite value of a loss, or infinity if there is none."""
    values = run.values(key)
    return values[-1][1] if values and math.isfinite(values[-1][1]) else math.inf


def ranking(runs: Sequence[RunFolder], by: str) -> Markup:
    """Return a table with one row per run, in the order of `runs`."""
    rows = []
    for name, run in zip(names_of(runs), runs, strict=True):
        ends = {axis: points[-1][1] for axis in AXES if (points := list(spent(run, axis)))}
        losses = [_last(run, key) for key in ("valid_loss", "lm_loss")]
        shown = ["" if math.isinf(loss) else f"{loss:.4f}" for loss in losses]
        cost = [short_number(ends[axis]) if axis in ends else "" for axis in AXES]
        last = max((int(record["iteration"]) for record in run.records), default=0)
        rows.append([name, *shown, f"{last:,}", *cost, status(run)[0]])
    heads = ("run", "validation loss", "training loss", "iterations", *AXES, "status")
    return html.paragraph(f"Best first, by the {by}.") + html.table("runs", heads, rows, range(1, len(heads) - 1))


def spent(run: RunFolder, axis: str) -> Iterator[tuple[float, float]]:
    """Yield (iteration, resources used so far) for each log line of a run. Token counts include all tokens on which the
    model was trained, also by earlier runs. If the run continues another run, the totals exclude the time and FLOPs of
    the earlier run. Times are sums of step times, and exclude pauses, evaluations and saves. Yield nothing if the run
    did not log the values that `axis` needs."""
    before, total = _first_iteration(run), 0.0
    for record in run.records:
        tokens, step = number(record.get("consumed_tokens")), number(record.get("step_time"))
        if "lm_loss" not in record or tokens is None:
            continue
        iteration = float(record["iteration"])
        if axis == "tokens":
            total = tokens
        elif step is None:
            continue
        else:
            rate = 1 / 3600 if axis == "hours" else _flops_per_second(run, record)
            if rate is None:
                continue
            total += rate * step * max(0.0, iteration - before)
        before = iteration
        yield iteration, total


def _first_iteration(run: RunFolder) -> float:
    """Return the number of iterations before the run: the iteration at the first start or, if no start is recorded, one
    log interval before the first log line."""
    starts = [event.get("iteration") for event in run.events if event.get("event") == "start"]
    if starts and (first := number(starts[0])) is not None:
        return first
    logged = [iteration for iteration, _ in run.values("lm_loss")][:2]
    return max(0.0, 2 * logged[0] - logged[1]) if len(logged) == 2 else 0.0


def _flops_per_second(run: RunFolder, record: Mapping[str, object]) -> float | None:
    """Return the FLOP/s of all devices together."""
    of_device = number(record.get("tflops_per_device"))
    return None if of_device is None or run.world_size is None else of_device * 1e12 * run.world_size


def along(points: Points, positions: Points) -> list[tuple[float, float]]:
    """Convert points over iterations to points over used resources. `positions` gives the used resources at each logged
    iteration. A point of iteration i is placed at the resources used at the last logged iteration that does not exceed
    i."""
    at = [iteration for iteration, _ in positions]
    places = [(bisect_right(at, iteration) - 1, value) for iteration, value in points]
    return [(positions[place][1], value) for place, value in places if place >= 0]


def losses(runs: Sequence[RunFolder]) -> Markup:
    """Draw one loss chart for each horizontal axis in `AXES`. Training losses are lines, and validation losses are
    dots."""
    shown = []
    for axis, words in AXES.items():
        series = []
        for run, colour, name in zip(runs, COLOURS_OF_RUNS, names_of(runs), strict=False):
            positions = list(spent(run, axis))
            series.append(Series(name, along(run.values("lm_loss"), positions), colour=colour))
            if dots := along(run.values("valid_loss"), positions):
                series.append(Series("", dots, dots=True, colour=colour))
        shown.append(curves(f"loss over {words}", "dots: validation", series, along=axis))
    return figures(shown) or html.paragraph("None of the runs has logged a loss.")
