"""Measurement of the parts of a run's wall time on the first rank, with totals over all starts of the run
(--log-goodput)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.extensions.observe.goodput import accounts
from megatron.extensions.observe.goodput.accounts import PARTS, Earlier, Seconds
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Evaluation, Log, Meter, RunView, Task
from megatron.training.metrics.sinks import Record
from megatron.training.progress import SAVE, Interval
from megatron.training.reliability.child_processes import own_start_time
from megatron.training.reliability.run_status import each_event, record_event
from megatron.training.run import TrainingRun

KEPT = 10_000
"""Number of recent steps whose times are stored, so that the run can roll back to any of these steps."""

EVENT_SECONDS = 30.0
"""Minimum number of seconds between two `goodput` events that are written with log lines. In addition, every save
writes a `goodput` event."""


class Goodput(Callback, Meter):
    """Callback that measures the parts of a run's wall time on the first rank."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        age = process_age()
        self._began = time.perf_counter() - age
        self._wall_began = time.time() - age

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self._run, self._measures = run, run.runtime.is_main
        run.lines.metrics = (*run.lines.metrics, "goodput")
        self._own = accounts.none()
        self._counted: Interval | None = None
        self._at_step: tuple[Interval, float] = (run.interval, 0.0)
        self._other = 0.0
        self._until = torch.full((KEPT, 3), -1.0, dtype=torch.float64)
        self._keep_until(run.progress.iteration)
        self._evaluation: tuple[float, float] | None = None
        self._event_at = 0.0
        self._earlier = Earlier(self._wall_began, accounts.none())
        if self._measures:
            self._earlier = accounts.earlier_starts(
                each_event(self.config.checkpoint.save_root), run.progress.iteration, self._wall_began
            )
            self._own["startup"] = max(0.0, run.interval.start - self._began)
            run.timers.watchers.append(self._watched)
        return (self,)

    def on_start(self, run: RunView) -> None:
        self._record_event()

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        """Return a task that records the step time at the end of each step. The time of a save after the last step is
        therefore not counted as step time."""
        return (Task("goodput", 1, self._step_ended, counts=True, reads_result=False),) if self._measures else ()

    def _step_ended(self) -> None:
        self._notice_rollback()
        self._at_step = (self._run.interval, self._run.interval.seconds())
        self._other = self._unmeasured(self._with_steps(self._at_step[1]))
        self._keep_until(self._run.progress.iteration)

    def _keep_until(self, iteration: int) -> None:
        """Store the seconds of useful and skipped steps up to an iteration. A rollback to this iteration restores the
        stored values."""
        known = [float(iteration), self._own["useful"], self._own["skipped"]]
        self._until[iteration % KEPT] = torch.tensor(known, dtype=torch.float64)

    def _notice_rollback(self) -> None:
        """After a rollback, count the time of the undone steps and of the rollback itself as `rolled_back`. This method
        detects a rollback as follows: the run has started a new log interval, but never logged the previous interval.
        """
        before, own = self._at_step[0], self._own
        if self._run.interval is before or before is self._counted:
            return
        to = self._run.progress.iteration - 1
        iteration, *seconds = self._until[to % KEPT].tolist()
        own["useful"], own["skipped"] = seconds if iteration == to else (0.0, 0.0)
        self._at_step = (self._run.interval, self._run.interval.seconds())
        own["rolled_back"] += max(0.0, self._unmeasured(self._with_steps(self._at_step[1])) - self._other)

    def take(self) -> Tensor:
        """Return the seconds that each part of the wall time (`PARTS`) has taken since the first start of the run, as a
        float64 tensor of shape [parts]. On ranks that do not measure, the tensor contains zeros."""
        spent = torch.zeros(len(PARTS), dtype=torch.float64)
        if self._measures:
            self._notice_rollback()
            seconds = self._seconds(self._with_steps(self._run.interval.seconds()))
            spent = torch.tensor([seconds[part] for part in PARTS], dtype=torch.float64)
        return spent.to(self._run.runtime.device)

    def report(self, summed: Tensor, interval: Interval) -> dict[str, float]:
        return accounts.values(dict(zip(PARTS, summed.tolist(), strict=True)))

    def lines(self, record: Record) -> list[str]:
        return [accounts.line(record)]

    def on_log(self, run: RunView, record: Record) -> None:
        """End the log interval. The time after this call belongs to the next log interval."""
        if self._measures:
            interval = self._run.interval
            steps = record["step_time"] * max(1, len(interval.results))
            self._own, self._counted = self._with_steps(steps), interval
            if time.perf_counter() - self._event_at >= EVENT_SECONDS:
                self._record_event()

    @contextmanager
    def evaluating(self, evaluation: Evaluation) -> Iterator[None]:
        """Measure the time of an evaluation. The time begins with the first dataset, and ends when `on_evaluation` is
        called, because the device finishes the evaluation only then."""
        began = self._evaluation[0] if self._evaluation else time.perf_counter()
        try:
            yield
        finally:
            self._evaluation = (began, time.perf_counter())

    def on_evaluation(self, run: RunView, split: str, record: Record) -> None:
        if self._evaluation is not None:
            self._own["evaluation"] += time.perf_counter() - self._evaluation[0]
            self._evaluation = None

    @contextmanager
    def _watched(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if part == SAVE:
            self._own["save"] += time.perf_counter() - began

    def on_checkpoint(self, run: RunView) -> None:
        self._record_event()

    def on_end(self, run: RunView) -> None:
        self._record_event()

    def _with_steps(self, step_seconds: float) -> Seconds:
        """Return the seconds that each part of the wall time has taken since the current start of the run, including
        the steps since the last log line. The time of these steps is divided between `useful` and `skipped` in
        proportion to the number of useful and skipped steps."""
        interval, own = self._run.interval, dict(self._own)
        if interval is self._counted:
            return own
        skipped = sum(result.skipped for result in interval.results) + interval.passed_over
        steps = len(interval.results) + interval.passed_over
        if steps:
            own["skipped"] += step_seconds * skipped / steps
            own["useful"] += step_seconds * (steps - skipped) / steps
        return own

    def _seconds(self, own: Seconds) -> Seconds:
        """Return how many seconds of wall time each part in `PARTS` has taken since the first start of the run. `own`
        contains the seconds of the current start. Time of the current start that belongs to no other part is counted as
        `other`."""
        if self._evaluation is not None:
            own["evaluation"] += self._evaluation[1] - self._evaluation[0]
        own["other"] = self._unmeasured(own)
        return {part: self._earlier.seconds[part] + own[part] for part in PARTS}

    def _unmeasured(self, own: Seconds) -> float:
        """Return the seconds of the current start that belong to no measured part of the wall time."""
        return max(0.0, time.perf_counter() - self._began - sum(own.values()))

    def _record_event(self) -> None:
        """Write a `goodput` event to `run_events.jsonl` if --save is set. The event contains the seconds that each part
        of the wall time has taken. The event includes the time of steps up to the last completed step."""
        if not self._measures:
            return
        self._event_at = time.perf_counter()
        interval, step_seconds = self._at_step
        seconds = self._seconds(self._with_steps(step_seconds if interval is self._run.interval else 0.0))
        rounded = {part: round(spent, 3) for part, spent in seconds.items()}
        facts = {"iteration": self._run.progress.iteration, "began": round(self._earlier.began, 3), "seconds": rounded}
        record_event(self.config.checkpoint.save, accounts.EVENT, **facts)


_counted_pids: set[int] = set()
"""Ids of processes whose start-up time is already counted."""


def process_age() -> float:
    """Return the number of seconds since this process started. Only the first call in a process returns the age; later
    calls return 0. The first call also returns 0 if the system does not provide the start time of the process.
    """
    if os.getpid() in _counted_pids:
        return 0.0
    _counted_pids.add(os.getpid())
    try:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - own_start_time())
    except (ValueError, AttributeError):
        return 0.0
