"""What a second process finds out about layers ahead of a search, in the order in which the search will come to them.

A trace is the same whoever takes it, and the search learns of times no sooner than it asks, so that what it finds does
not depend on which process was faster. Without a second core, or once the process has ended, it times all itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from megatron.planner.search.best_first import Candidate, best_first
from megatron.planner.search.layouts import Family
from megatron.planner.time.step_time import StageTimes
from megatron.training.config.suggest.costs import LayoutCosts

Bounded = Callable[[Family], Candidate[Any]]


@contextmanager
def timed_ahead(costs: LayoutCosts, families: Sequence[Candidate[Any]], bounded: Bounded) -> Iterator[None]:
    """Within it, `costs.times` takes what the process has found. `bounded` bounds a family anew once more is known."""
    if len(os.sched_getaffinity(0)) < 2:
        yield
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_time_all, args=(costs, families, bounded, theirs), daemon=True)
    try:
        process.start()
    except OSError:  # no process to spare
        yield
        return
    theirs.close()
    costs.ahead = _Results(ours, costs).of
    try:
        yield
    finally:
        costs.ahead = None
        process.kill()
        process.join()
        ours.close()


class _Results:
    def __init__(self, pipe: Connection, costs: LayoutCosts) -> None:
        self._pipe: Connection | None = pipe
        self._costs, self._begun = costs, set[Family]()
        self._times: dict[Family, list[StageTimes]] = {}

    def of(self, family: Family) -> list[StageTimes] | None:
        """The times of a family, waited for where they have been begun; None if they have not."""
        while self._pipe is not None and (self._pipe.poll() or (family in self._begun and family not in self._times)):
            try:
                self._receive(self._pipe)
            except (EOFError, OSError):
                self._pipe = None
        return self._times.get(family)

    def _receive(self, pipe: Connection) -> None:
        family, times, slopes, events = pipe.recv()
        self._begun.add(family)
        if times is not None:
            self._times[family] = times
        self._costs.slopes.update(slopes)
        for batch, parts in events.items():
            self._costs.cache.events.setdefault(batch, {}).update(parts)


def _time_all(costs: LayoutCosts, families: Sequence[Candidate[Any]], bounded: Bounded, pipe: Connection) -> None:
    """Times families and measures what bounds the memory of their layouts, those with the lowest bounds first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the search ends this process
    told = set(costs.slopes)
    sent = {batch: set(parts) for batch, parts in costs.cache.events.items()}

    def refine(candidate: Candidate[Any]) -> Iterator[Candidate[Any]]:
        family = candidate.item
        again = bounded(family)
        if again.bound > candidate.bound:
            yield again
            return
        pipe.send((family, None, {}, {}))
        for layout in costs.run.space.layouts(family):
            costs.memory_bound(layout)
        times = costs.times(family)
        fresh = {}
        for batch, parts in costs.cache.events.items():
            known = sent.setdefault(batch, set())
            if new := {part: events for part, events in parts.items() if part not in known}:
                known.update(new)
                fresh[batch] = new
        slopes = {key: costs.slopes[key] for key in costs.slopes.keys() - told}
        told.update(slopes)
        pipe.send((family, times, slopes, fresh))

    with suppress(OSError, ValueError):  # the search has ended; it will meet the same error itself
        for _ in best_first(families, refine):
            pass
    os._exit(0)
