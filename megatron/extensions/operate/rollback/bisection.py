"""Bisection of a loss spike: the steps before the spike are repeated with a different document, batch or learning rate,
to find the cause of the spike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megatron.core.dist_checkpointing.path_kind import METRICS_FILE, saved_folders
from megatron.extensions.operate.rollback.branches import Change, Outcome, Part
from megatron.training.metrics.sinks import records_until
from megatron.training.reliability.run_status import recorded_events

EARLIER = 100
"""Number of earlier loss records that the loss of a step is compared with."""

FEWEST = 5
"""Minimum number of earlier loss records that a step is compared with. A step with fewer earlier records is never
considered a spike."""

GONE = 0.5
"""A change is considered to remove a spike if the loss increases by less than this fraction of the original
increase."""

TYPICAL = 10
"""The loss of the spike is compared with the median of this number of losses before the spike."""

LARGE_NORM = 3.0
"""If the gradient norm of a step exceeds the median of earlier norms by more than this factor, the batch of the step
may have caused the spike."""

ROSE = 1.05
"""A learning rate counts as risen if it exceeds this multiple of the learning rate at the checkpoint."""

LOWER = 0.1
"""The branch that tests a lower learning rate limits the rate to this multiple of the highest rate before the spike. If
the learning rate has risen since the checkpoint, the limit is instead the rate at the checkpoint."""

BranchOf = Callable[[int, Change], Outcome]
"""Function that repeats the run up to an iteration with one change, such as another learning rate, and returns the
losses."""


@dataclass(frozen=True)
class RunFiles:
    """Files of a run with a loss spike: the records of the run, and the checkpoint before the spike."""

    folder: Path
    records: tuple[dict[str, Any], ...]
    spike: int
    checkpoint: int

    @classmethod
    def read(cls, folder: Path, spike: int | None, checkpoint: int | None) -> RunFiles:
        """Find the spike and the newest checkpoint before the spike. By default, the spike is the spike that caused the
        last rollback. If there were no rollbacks, the spike is the largest increase of the loss. Raises ValueError if
        there are too few records to find a spike, or if there is no checkpoint before the spike."""
        lines, _ = records_until((folder / METRICS_FILE).read_text(encoding="utf-8"), 2**62)
        records = tuple(each for each in map(json.loads, lines) if each.get("lm_loss") is not None)
        back = [event for event in recorded_events(folder) if event.get("event") == "rollback"]
        back = [event for event in back if spike in (None, event["iteration"])]
        found = spike or (int(str(back[-1]["iteration"])) if back else largest_rise(records))
        before = min([found, *(int(first) for event in back for first in [event["passed_over"][0]])])  # type: ignore[index]
        saved = [number for number in saved_folders(folder) if number < before]
        if checkpoint is None and not saved:
            raise ValueError(f"{folder} has no checkpoint before iteration {before}; choose a run that has one")
        if checkpoint is not None and checkpoint not in saved:
            there = ", ".join(map(str, sorted(saved))) or "none"
            raise ValueError(f"--from {checkpoint}: the checkpoints before iteration {before} are {there}")
        return cls(folder, records, found, max(saved) if checkpoint is None else checkpoint)

    @property
    def loaded(self) -> Path:
        """Folder of the checkpoint from which the branches start."""
        return saved_folders(self.folder)[self.checkpoint]

    def losses_before(self, iteration: int) -> dict[int, float]:
        """Return the recorded losses by iteration, up to and including the given iteration."""
        return {each["iteration"]: float(each["lm_loss"]) for each in self.records if each["iteration"] <= iteration}

    def difference(self, base: Outcome, suspect: int) -> float | None:
        """Compare the losses of the run with those of an unchanged repetition, and return the largest relative
        difference at any iteration before `suspect`. Return None if there are no losses to compare."""
        own = self.losses_before(suspect - 1)
        shares = [abs(loss / own[at] - 1.0) for at, loss in base.losses.items() if own.get(at)]
        return max(shares, default=None)

    def loss_of_spike(self, otherwise: float) -> float:
        """Return the loss of the run at the iteration of the spike, as recorded in a rollback event or in the metrics.
        Return `otherwise` if the loss was not recorded."""
        known = {each["iteration"]: float(each["lm_loss"]) for each in self.records}
        for event in recorded_events(self.folder):
            if event.get("event") == "rollback":
                known[int(str(event["iteration"]))] = float(str(event["lm_loss"]))
        return known.get(self.spike, otherwise)

    def value(self, name: str, iteration: int) -> float | None:
        """Return the latest recorded value of the field `name` at or before an iteration. Return None if there is no
        such value."""
        found = [each[name] for each in self.records if each["iteration"] <= iteration and each.get(name) is not None]
        return float(found[-1]) if found else None


def largest_rise(records: Sequence[Mapping[str, Any]]) -> int:
    """Return the iteration with the largest ratio of the loss to the mean of the earlier losses. Raises ValueError if
    there are too few records."""
    losses = [float(each["lm_loss"]) for each in records]
    if len(losses) <= FEWEST:
        rule = f"{METRICS_FILE} has {len(losses)} losses, too few to find a spike"
        raise ValueError(f"{rule}; set --iteration, or choose a run with --log-interval 1")

    def rise(place: int) -> float:
        before = losses[max(0, place - EARLIER) : place]
        return losses[place] / (sum(before) / len(before))

    return int(records[max(range(FEWEST, len(losses)), key=rise)]["iteration"])


@dataclass(frozen=True)
class Row:
    """Losses of one branch: a repetition of the run from a checkpoint, with at most one change."""

    name: str
    loss: float | None
    """Loss of the branch at the iteration of the spike; None if the branch skips this iteration."""

    highest: float
    spikes: bool


@dataclass(frozen=True)
class Bisection:
    """Losses of all branches that a bisection has run, and the cause of the spike according to these losses."""

    spike: int
    suspect: int
    """Iteration whose batch may have caused the spike."""

    before: float
    """Baseline loss: the median of the last losses before the iteration `suspect`."""

    rows: tuple[Row, ...]
    worst: Part
    rate: float
    difference: float | None
    """Largest relative difference between the losses of the run and the losses of an unchanged repetition, at any
    iteration before `suspect`. None if the run has recorded none of these losses."""

    cause: str
    """Change that removes the spike: "document", "batch" or "rate". The value is "none" if none of these changes
    removes the spike, and "gone" if the unchanged steps have no spike."""


def suspect_of(base: Outcome, spike: int) -> int:
    """Return the iteration whose batch may have caused a spike: the first earlier iteration with a large gradient norm,
    or the iteration of the spike if no earlier gradient norm was large."""
    norms = list(base.norms.items())
    for place, (iteration, norm) in enumerate(norms):
        if place >= 2 and iteration < spike and norm > LARGE_NORM * median(each for _, each in norms[:place]):
            return iteration
    return spike


def held_rate(base: Outcome, files: RunFiles, spike: int) -> float:
    """Return the bound on the learning rate for the branch that tests a lower rate. The bound is the learning rate at
    the checkpoint if the rate has risen since then, and otherwise a tenth of the highest rate before the spike."""
    highest = max(rate for iteration, rate in base.rates.items() if iteration <= spike)
    before = files.value("learning_rate", files.checkpoint)
    return before if before and highest > ROSE * before else LOWER * highest


def bisect(files: RunFiles, branch_of: BranchOf, after: int) -> Iterator[str | Bisection]:
    """Run all branches of a bisection, one after another. Yield a log line before each branch, and finally the
    result."""
    spike, last = files.spike, files.spike + after
    yield f"branches from the checkpoint of iteration {files.checkpoint} to iteration {last}"
    base = branch_of(last, Change(looks_at=spike))
    suspect = suspect_of(base, spike)
    if suspect != spike:
        base = branch_of(last, Change(looks_at=suspect))
    earlier = files.losses_before(files.checkpoint) | {at: loss for at, loss in base.losses.items() if at < suspect}
    if not earlier:
        raise ValueError(f"no loss before iteration {suspect} in {files.folder}; set --from to an earlier checkpoint")
    before = median(list(earlier.values())[-TYPICAL:])
    rise = _highest(base, suspect) - before
    rows = [_row("as it was", base, spike, suspect, True)]
    worst, rate = max(base.parts, key=lambda part: part.loss), held_rate(base, files, spike)
    found = Bisection(spike, suspect, before, tuple(rows), worst, rate, files.difference(base, suspect), "gone")
    if rise < GONE * (files.loss_of_spike(base.losses[spike]) - before) or rise <= 0:
        yield found
        return
    end = max(samples.stop for samples in base.samples.values())
    batch = {sample: end + place for place, sample in enumerate(base.samples[suspect])}
    changes = {
        "document": ("document replaced", Change({worst.sample: batch[worst.sample]})),
        "batch": (f"batch of iteration {suspect} replaced", Change(batch)),
        "rate": (f"rate held at {rate:.3g}", Change(rate=rate)),
    }
    gone = list[str]()
    for cause, (name, change) in changes.items():
        yield f"branch: {name}"
        other = branch_of(last, change)
        spikes = _highest(other, suspect) - before >= GONE * rise
        rows.append(_row(name, other, spike, suspect, spikes))
        gone += [] if spikes else [cause]
    yield replace(found, rows=tuple(rows), cause=gone[0] if gone else "none")


def _highest(found: Outcome, since: int) -> float:
    return max(loss for iteration, loss in found.losses.items() if iteration >= since)


def _row(name: str, found: Outcome, spike: int, suspect: int, spikes: bool) -> Row:
    return Row(name, found.losses.get(spike), _highest(found, suspect), spikes)


def lines_of(found: Bisection, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the lines of a report: a table with one row per branch, followed by the cause of the spike."""
    yield f"spike at iteration {found.spike}; loss {found.before:.4g} before"
    if found.difference is not None:
        yield f"before the spike, losses of the branch and of the run differ by at most {found.difference:.1e}"
    yield f"{'branch':<40}{f'loss at {found.spike}':>14}{'highest since':>15}{'spike':>7}"
    for row in found.rows:
        loss = "-" if row.loss is None else f"{row.loss:.4g}"
        yield f"{row.name:<40}{loss:>14}{row.highest:>15.4g}{'yes' if row.spikes else 'no':>7}"
    worst = found.worst
    document = worst.origin.rpartition("+")[0].rpartition(":")
    about = {
        "document": f"document {document[2]} of {document[0]}",
        "batch": f"the batch of iteration {found.suspect}, but none of its documents alone",
        "rate": f"the learning rate: held at {found.rate:.3g} there is no spike",
        "none": "none of these changes alone removes the spike; start from an earlier checkpoint with --from",
        "gone": "nothing reproducible: the same steps have no spike here; suspect a device of the run",
    }
    yield f"verdict: {about[found.cause]}"
    if found.cause in ("document", "batch"):
        yield f"highest loss of iteration {found.suspect}: sample {worst.sample}, {worst.origin}, {worst.loss:.4g}"
        yield f"text: {decode(worst.tokens)}"
