"""Detection of slow ranks in each phase of a step.

A fast rank waits for slow ranks, so all ranks take about the same total time. Therefore, only the time of each rank's
own work is compared. On CPUs, the measured time is the duration of a phase without its waits for messages and
collectives. On CUDA, the measured time is the time between two device events, which are recorded at the start and the
end of a phase. The phase `data` is always measured on the host. The measured time does not include waits for pipeline
messages and for data-parallel collectives. The measured time includes collectives within a layer (TP, CP, EP), so a
slow rank also increases the measured times of the other ranks in its group.

The end of the gradient reduction is the only phase whose measured time includes waits. In this phase, the slow rank is
the one that waits the shortest time. Measuring never synchronizes with the device, because events are read only after
they have completed.
"""

from __future__ import annotations

import functools
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import gather_objects
from megatron.extensions.observe.diagnosis.flags import DiagnosisConfig
from megatron.training.hooks import Callback, Meter
from megatron.training.metrics.sinks import Record
from megatron.training.progress import GRAD_SYNC, STEP_PARTS, Interval
from megatron.training.run import TrainingRun


class Waits:
    """Time in seconds that the training thread waits in torch.distributed, including blocking collectives."""

    seconds = 0.0

    @classmethod
    @functools.cache
    def install(cls) -> None:
        """Start measuring every wait of the calling thread for a collective or message. A second call has no effect."""
        wait, thread = dist.Work.wait, threading.get_ident()

        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                if threading.get_ident() == thread:  # waits of the thread that writes checkpoints are not measured
                    cls.seconds += time.perf_counter() - start

        dist.Work.wait = timed  # type: ignore[method-assign]


class Stragglers(Callback, Meter):
    """Callback that compares the times that ranks spend on their own work in each part of a step (--log-straggler)."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        world = run.runtime.state.world
        self.hosts = gather_objects(socket.gethostname(), world)
        self.world = world
        self.device = run.runtime.device
        self.clock = PhaseClock(run.runtime.device)
        run.timers.watchers.append(self.clock)
        return (self,)

    def take(self) -> Tensor:
        """Return the seconds that this rank spent in each part of a step, as a flattened table [ranks * parts]. The
        rows of other ranks are zeros, so that a sum over all ranks yields the complete table."""
        table = torch.zeros(self.world.size, len(STEP_PARTS), dtype=torch.float64, device=self.device)
        table[self.world.rank] = torch.tensor(self.clock.take(), dtype=torch.float64)
        return table.flatten()

    def report(self, summed: Tensor, interval: Interval) -> dict[str, object]:
        table = summed.view(self.world.size, -1).tolist()
        return straggler_record(table, len(interval.results), self.config.options(DiagnosisConfig))

    def lines(self, record: Record) -> list[str]:
        return straggler_line(record, self.hosts)


class PhaseClock:
    """Clock that sums the seconds that this rank spends on its own work in each part of a step."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        if dist.is_initialized():
            Waits.install()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`, if `phase` is a part of a step."""
        if phase not in self.seconds:
            yield
        elif self.cuda and phase != "data":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((phase, start, end))
            self._read(wait=False)
        else:
            start_time, waited = time.perf_counter(), Waits.seconds
            yield
            waiting = 0.0 if phase == GRAD_SYNC else Waits.seconds - waited
            self.seconds[phase] += time.perf_counter() - start_time - waiting

    def take(self) -> list[float]:
        """Return the seconds that each part in `STEP_PARTS` took since the last call of this method. This method waits
        for the device."""
        self._read(wait=True)
        taken = [self.seconds[phase] for phase in STEP_PARTS]
        self.seconds = dict.fromkeys(STEP_PARTS, 0.0)
        return taken

    def _read(self, wait: bool) -> None:
        while self._events:
            phase, start, end = self._events[0]
            if not end.query():
                if not wait:
                    return
                end.synchronize()
            self.seconds[phase] += start.elapsed_time(end) / 1e3
            self._events.popleft()


def slowest(seconds: Sequence[float], count: int) -> list[tuple[int, float, float]]:
    """Return the `count` slowest ranks, slowest first, as tuples (rank, seconds, ratio to the median)."""
    median = statistics.median(seconds)
    ranks = sorted(range(len(seconds)), key=lambda rank: (-seconds[rank], rank))[:count]
    return [(rank, seconds[rank], seconds[rank] / median if median > 0 else 1.0) for rank in ranks]


def straggler_record(table: Sequence[Sequence[float]], steps: int, config: DiagnosisConfig) -> dict[str, object]:
    """Return a log record of the slowest ranks in each phase. `table` [rank][phase] contains the total seconds of
    `steps` steps. The record contains seconds per step."""
    record: dict[str, object] = {}
    for number, phase in enumerate(STEP_PARTS) if steps else ():
        found = slowest([row[number] / steps for row in table], config.straggler_minmax_count)
        rank, seconds, ratio = found[0]
        record[f"straggler_{phase}_rank"] = rank
        record[f"straggler_{phase}_seconds"] = seconds
        record[f"straggler_{phase}_ratio"] = ratio
        record[f"straggler_{phase}"] = [list(entry) for entry in found]
    return record


def straggler_line(record: Record, hosts: Sequence[str]) -> list[str]:
    """Return a list with the console line that shows the slowest ranks of each phase; empty if ranks were not
    compared."""
    if f"straggler_{STEP_PARTS[0]}" not in record:
        return []
    parts = []
    for phase in STEP_PARTS:
        entries = [
            f"rank {rank} on {hosts[rank]} {1e3 * seconds:.1f} ms (x{ratio:.2f})"
            for rank, seconds, ratio in record[f"straggler_{phase}"]
        ]
        parts.append(f"{phase}: {', '.join(entries)}")
    return [" slowest ranks, own time per step (x of the median) | " + " | ".join(parts)]
