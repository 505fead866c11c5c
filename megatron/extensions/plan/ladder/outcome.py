"""Read the validation losses of a ladder's runs from their metrics.jsonl files. This module does not import torch."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.path_kind import METRICS_FILE
from megatron.extensions.plan.ladder.law import Point
from megatron.extensions.plan.ladder.rungs import Ladder, Rung, Size
from megatron.extensions.plan.ladder.valid_loss import valid_loss

TABLE = "rungs.csv"
COLUMNS = ("rung", "hidden_size", "num_layers", "parameters", "tokens", "iterations", "lr", "done", "valid_loss")


@dataclass(frozen=True)
class Outcome:
    """Progress and validation losses of one rung, which is a small run of a ladder."""

    rung: Rung
    losses: dict[int, float]
    """Finite validation losses, keyed by the number of the evaluation, which starts at 1."""

    evaluations: int
    diverged: bool = False
    """True if the run has finished and its last validation loss is not finite."""

    @property
    def loss(self) -> float | None:
        """Return the last validation loss; None if the run has not finished or has diverged."""
        return self.losses.get(self.evaluations)

    @property
    def done(self) -> float:
        """Return the share of the run's evaluations that are finished."""
        return 1.0 if self.diverged else max(self.losses, default=0) / self.evaluations

    def point(self, evaluation: int | None = None) -> Point:
        """Return the data point that this rung contributes to a law: the size of the rung, and its loss at an
        evaluation (by default, the last one)."""
        size, number = self.rung.size, evaluation or self.evaluations
        return Point(size.parameters, size.tokens, self.losses[number])


def outcome(ladder: Ladder, rung: Rung, folder: Path) -> Outcome:
    """Read the progress of a rung from its files. If a resumed run repeated an evaluation, the later loss counts."""
    interval, last = ladder.interval(rung), ladder.evaluations
    losses: dict[int, float] = {}
    for record in _records(folder / rung.name / METRICS_FILE):
        loss, iteration = valid_loss(record), record.get("iteration")
        if loss is not None and isinstance(iteration, int) and iteration % interval == 0:
            losses[iteration // interval] = loss
    finite = {number: loss for number, loss in losses.items() if 1 <= number <= last and math.isfinite(loss)}
    return Outcome(rung, finite, last, diverged=last in losses and last not in finite)


def outcomes(ladder: Ladder, folder: Path) -> list[Outcome]:
    return [outcome(ladder, rung, folder) for rung in ladder.rungs]


def _records(path: Path) -> Iterable[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # The last line may be incomplete, because the run may still be writing the file.
        if isinstance(record, dict):
            yield record


def of_law(found: Sequence[Outcome], rate: float) -> list[Outcome]:
    """Select the finished runs to which the law is fitted: one run per size, sorted by compute. If all sizes sweep the
    same learning rates, the run with the lowest loss is selected. Otherwise, the run with the learning rate `rate`,
    which is the rate of the target, is selected. All selected runs then use the same learning rate."""
    sizes: dict[Size, list[Outcome]] = {}
    for each in found:
        sizes.setdefault(each.rung.size, []).append(each)
    alike = tuned(found)
    best = []
    for runs in sizes.values():
        finished = [(each.loss, each) for each in runs if each.loss is not None and (alike or each.rung.rate == rate)]
        if finished:
            best.append(min(finished, key=lambda pair: pair[0])[1])
    return sorted(best, key=lambda each: each.rung.size.compute)


def tuned(found: Sequence[Outcome]) -> bool:
    """Return True if all sizes sweep the same learning rates and there are at least two rates."""
    rates: dict[Size, set[float]] = {}
    for each in found:
        rates.setdefault(each.rung.size, set()).add(each.rung.rate)
    first = next(iter(rates.values()), set())
    return len(first) > 1 and all(each == first for each in rates.values())


def table(found: Sequence[Outcome]) -> str:
    """Format the rungs as CSV, with one line per rung."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in found:
        size = each.rung.size
        last = max(each.losses, default=0)
        loss = "diverged" if each.diverged else f"{each.losses[last]:.6f}" if last else ""
        values = (size.hidden_size, size.num_layers, size.parameters, size.tokens, size.iterations)
        writer.writerow([each.rung.name, *values, f"{each.rung.rate:g}", f"{each.done:.0%}", loss])
    return text.getvalue()
