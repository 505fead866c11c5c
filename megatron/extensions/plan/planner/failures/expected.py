"""Compute the expected goodput of a run on devices that fail, its best save interval, and the number of spare nodes
worth paying for. This module does not import torch.

Failures are modeled as a Poisson process. A run of W devices, each with `rate` failures a day, fails every M = 86400 /
(rate W) seconds on average. The run saves after every tau seconds of steps, and each save stops the run for delta
seconds. After a failure, the run needs R seconds until its next step. The run takes

T = M exp(R / M) (exp((tau + delta) / M) - 1)

seconds for tau seconds of steps (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
2006, equation 20; failures during a restart are counted). A save that is written in the background can be loaded only
after w more seconds of steps. A failure during these w seconds also loses the steps that the save covers, so w is added
to the restart time R. Goodput is tau / T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

RESTART_SECONDS = 120.0
"""Default of --restart-seconds: seconds from a failure to the next step."""

SAVE_GB_PER_SECOND_PER_NODE = 2.0
"""Assumed GB/s at which a node writes to storage; used if neither --save-seconds nor earlier saves give the time of a
save."""

REPAIR_HOURS = 4.0
"""Default of --repair-hours: hours from the failure of a node until it can be used again."""

MOST_SPARES = 4096
SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True)
class AskedFailures:
    """Values of --failures-per-gpu-day and its dependent options; None for options that are not given."""

    per_device_day: float
    restart_seconds: float | None = None
    save_seconds: float | None = None
    repair_hours: float | None = None


@dataclass(frozen=True)
class SaveCost:
    """Cost of a save, in seconds."""

    blocking: float
    """Number of seconds for which a save stops training (delta)."""

    seconds: float
    """Seconds from the start of a save until the saved checkpoint can be loaded."""

    source: str
    """Text that describes how `seconds` was determined."""


@dataclass(frozen=True)
class Shares:
    """Breakdown of the wall time of a run that saves every `steps` steps. The four shares of the wall time sum to 1."""

    steps: int
    goodput: float
    saves: float
    restarts: float
    repeated: float


@dataclass(frozen=True)
class Expected:
    """Expected cost of a run on devices that fail."""

    step_seconds: float
    between_failures: float
    """Mean number of seconds between two failures of the whole run (M)."""

    restart_seconds: float
    save: SaveCost

    def shares(self, steps: int) -> Shares:
        """Return the shares of the wall time of a run that saves every `steps` steps. A save does not start before the
        previous save has finished."""
        trained, mean = steps * self.step_seconds, self.between_failures
        blocking = max(self.save.blocking, self.save.seconds - trained)
        restart = self.restart_seconds + self.save.seconds - blocking
        # With an exponent this large, the run almost never completes the next save, and math.exp could overflow.
        if (restart + trained + blocking) / mean > 500:
            return Shares(steps, 0.0, 0.0, 1.0, 0.0)
        wall = mean * math.exp(restart / mean) * math.expm1((trained + blocking) / mean)
        goodput = trained / wall
        saves = goodput * blocking / trained
        restarts = -math.expm1(-self.restart_seconds / mean)
        return Shares(steps, goodput, saves, restarts, max(0.0, 1.0 - goodput - saves - restarts))

    def best(self) -> Shares:
        """Return the wall time shares for the save interval with the highest goodput."""
        low, high = 1, max(1, math.ceil(20 * (self.between_failures + self.save.seconds) / self.step_seconds))
        while high - low > 2:  # as a function of the interval, goodput has a single maximum
            third = (high - low) // 3
            left, right = low + third, high - third
            if self.shares(left).goodput < self.shares(right).goodput:
                low = left
            else:
                high = right
        return max((self.shares(steps) for steps in range(low, high + 1)), key=lambda each: each.goodput)


def measured_save(events: Sequence[Mapping[str, object]]) -> float | None:
    """Return the median duration in seconds of the successful saves in `run_events.jsonl`; None if there are none."""
    found = [event.get("seconds") for event in events if event.get("event") == "save" and "error" not in event]
    seconds = [float(each) for each in found if isinstance(each, int | float) and each > 0]
    return median(seconds) if seconds else None


def save_cost(shard_bytes: int, bytes_per_node: int, host_gb: float, background: bool, known: float | None) -> SaveCost:
    """Return the expected cost of a save.

    Args:
        shard_bytes: Bytes that the fullest rank copies to host memory before training continues.
        bytes_per_node: Bytes that a node writes.
        host_gb: Rate in GB/s at which a rank copies data to host memory.
        background: Whether files are written while training continues.
        known: Stated or measured duration of a save in seconds; None to assume a storage rate.
    """
    written = bytes_per_node / SAVE_GB_PER_SECOND_PER_NODE / 1e9
    copied = shard_bytes / host_gb / 1e9
    source = f"assuming that a node writes {SAVE_GB_PER_SECOND_PER_NODE:g} GB/s; --save-seconds overrides this"
    seconds = max(copied, written) if known is None else known
    return SaveCost(min(copied, seconds) if background else seconds, seconds, source if known is None else "")


def spares_worth(nodes: int, node_failures_per_second: float, repair_seconds: float) -> tuple[int, float, float]:
    """Find the number of spare nodes that maximizes the training progress per paid node.

    The number of failed nodes at any time follows a Poisson distribution whose mean is `nodes *
    node_failures_per_second * repair_seconds`. The run waits while there are more failed nodes than spares.

    Returns:
        A tuple of three values: the number of spare nodes, the share of the time in which enough nodes are available
        with these spares, and the same share without spares.
    """
    mean = nodes * node_failures_per_second * repair_seconds
    present, term = 0.0, math.exp(-mean)
    best, alone = (0, 0.0, 0.0), math.exp(-mean)
    for spares in range(MOST_SPARES):
        present += term
        term *= mean / (spares + 1)
        value = present * nodes / (nodes + spares)
        if value > best[1]:
            best = (spares, value, present)
        if spares > mean and 1.0 - present < 1e-9:
            break
    return best[0], best[2], alone


def failure_lines(expected: Expected, given: int | None, nodes: int, repair_hours: float) -> Iterator[str]:
    """Yield lines about the failures of a run, its goodput, and spare nodes. The goodput is stated for the best save
    interval and for the run's own save interval, `given`."""
    save, best = expected.save, expected.best()
    yield f"a failure every {_time(expected.between_failures)}, {_time(expected.restart_seconds)} until the next step"
    source = f" ({save.source})" if save.source else ""
    yield f"a save stops the run for {_time(save.blocking)}, and can be loaded after {_time(save.seconds)}{source}"
    interval = _time(best.steps * expected.step_seconds)
    yield f"best --save-interval {best.steps:,}, every {interval}: {_shares(best)}"
    if given is not None:
        yield f"--save-interval {given:,}: {_shares(expected.shares(given))}"
    per_node = 1.0 / (expected.between_failures * nodes)
    spares, present, alone = spares_worth(nodes, per_node, repair_hours * 3600)
    yield (
        f"spare nodes that pay: {spares:,} in addition to {nodes:,}, if each failure takes a node away for "
        f"{repair_hours:g} h; all nodes are available {present:.2%} of the time; without spares, {alone:.2%}"
    )


def failure_record(expected: Expected, given: int | None, nodes: int, repair_hours: float) -> dict[str, object]:
    """Return the content of `failure_lines` as JSON; times are in seconds."""
    per_node = 1.0 / (expected.between_failures * nodes)
    spares, present, alone = spares_worth(nodes, per_node, repair_hours * 3600)
    return {
        "seconds_between_failures": expected.between_failures,
        "restart_seconds": expected.restart_seconds,
        "save_blocking_seconds": expected.save.blocking,
        "save_seconds": expected.save.seconds,
        "best": vars(expected.best()),
        "given": None if given is None else vars(expected.shares(given)),
        "spare_nodes": spares,
        "all_nodes_present": present,
        "all_nodes_present_without_spares": alone,
    }


def _shares(found: Shares) -> str:
    return (
        f"goodput {found.goodput:.2%}, saves {found.saves:.2%}, restarts {found.restarts:.2%}, "
        f"repeated steps {found.repeated:.2%}"
    )


def _time(seconds: float) -> str:
    for name, unit, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 72)):
        if seconds / unit < most:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:,.3g} days"
