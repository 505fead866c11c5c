"""What a second process finds out about layers ahead of a search, in the order in which the search will come to them:
bounds and times of families first, then what layouts hold that the search expects to measure.

A trace is the same whoever takes it, and the search learns of times no sooner than it asks, so that what it finds does
not depend on which process was faster. Without a second core, or once the process has ended, it finds out all itself.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from megatron.extensions.planner.processes import end_with_parent
from megatron.extensions.planner.suggest.bounds import Candidate, best_first
from megatron.extensions.planner.suggest.costs import NOTHING_HELD, LayoutCosts
from megatron.extensions.planner.suggest.layouts import Family, Layout
from megatron.extensions.planner.time.step_time import StageTimes

Bounded = Callable[[Candidate[Any]], Candidate[Any] | None]

LOCKED = 1.0
"""Seconds after which a lock that is held for a moment is not given back any more."""

T = TypeVar("T")
Subject = tuple[str, Hashable]
"""The "bounds" or the "times" of a family, or the "memory" of a part."""


@contextmanager
def found_ahead(
    costs: LayoutCosts,
    families: Sequence[Candidate[Any]],
    bounded: Bounded,
    coming: Callable[[], list[Family]],
    most: int | None = None,
) -> Iterator[None]:
    """Within it, `costs` takes what the process has found, which times `most` families. `bounded` bounds a family anew
    once more is known; None says that no layout of it fits. While the search waits, it times what is `coming`."""
    if len(os.sched_getaffinity(0)) < 2:
        yield
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    claims = _Claims([each.item for each in families])
    arguments = costs, families, bounded, most, claims, theirs, os.getpid()
    process = fork.Process(target=_find, args=arguments, daemon=True)
    try:
        process.start()
    except OSError:  # no process to spare
        yield
        return
    theirs.close()
    measure = costs.plans.found
    costs.ahead = Ahead(ours, costs, claims, coming)
    costs.plans.found = costs.ahead.memory
    try:
        yield
    finally:
        costs.ahead, costs.plans.found = None, measure
        process.kill()
        process.join()
        ours.close()


class _Claims:
    """Families whose layers one of two processes times."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._numbers = {family: number for number, family in enumerate(families)}
        self._taken = multiprocessing.get_context("fork").Array("b", len(families))

    def taken(self, family: Family) -> bool:
        """Whether one of them has it; it may not be among the families."""
        return family in self._numbers and bool(self._taken[self._numbers[family]])

    def take(self, family: Family) -> bool:
        """Whether nobody had it before. A process that is killed may keep the lock: to time a family twice does no
        harm."""
        number, lock = self._numbers[family], self._taken.get_lock()
        if not lock.acquire(timeout=LOCKED):
            return True
        free = not self._taken[number]
        self._taken[number] = 1
        lock.release()
        return free


class Ahead:
    """What the process has found, as the search asks for it. What has been begun is waited for."""

    def __init__(
        self, pipe: Connection, costs: LayoutCosts, claims: _Claims, coming: Callable[[], list[Family]]
    ) -> None:
        self._pipe: Connection | None = pipe
        self._costs, self._claims, self._coming = costs, claims, coming
        self._begun = set[Subject]()
        self._ended: dict[Subject, Any] = {}
        self._expected: list[Layout] = []
        self._own = list[int]()
        """Hashes of parts that were measured here, and are not told yet."""

    def bounds(self, family: Family) -> None:
        """Takes what bounds the memory of a family's layouts, if it is known."""
        self._of("bounds", family)

    def times(self, family: Family) -> list[StageTimes] | None:
        """The times of a family, if they are known. Where the process has them in hand, others are timed meanwhile."""
        subject: Subject = "times", family
        if subject not in self._ended and self._claims.take(family):
            self._time(family)
        self._begun.add(subject)
        while self._pipe is not None and subject not in self._ended and not self._pipe.poll():
            other = next((each for each in self._coming() if self._claims.take(each)), None)
            if other is None:
                break
            self._time(other)
        return self._of(*subject)

    def _time(self, family: Family) -> None:
        self._ended["times", family] = None  # the search will meet an error itself
        with suppress(ValueError):
            times = self._ended["times", family] = self._costs.timed(family)
            self._tell((None, [], {family: times}))

    def memory(self, part: Hashable, measure: Callable[[], T]) -> T:
        """What a part holds: found ahead, or measured now."""
        known = self._of("memory", part)
        if known is not None:
            return known
        self._own.append(hash(part))
        return measure()

    def expect(self, layouts: list[Layout]) -> None:
        """Says which layouts the search is likely to measure next."""
        if self._pipe is not None and layouts != self._expected:
            self._expected = layouts
            self._tell((layouts, self._own, {}))
            self._own = []

    def _tell(self, message: tuple[list[Layout] | None, list[int], dict[Family, list[StageTimes]]]) -> None:
        if self._pipe is not None:
            with suppress(OSError):  # the process has ended
                self._pipe.send(message)

    def _of(self, kind: str, what: Hashable) -> Any:
        subject = kind, what
        while self._pipe is not None and (self._pipe.poll() or (subject in self._begun and subject not in self._ended)):
            try:
                self._receive(self._pipe)
            except (EOFError, OSError):
                self._pipe = None
        return self._ended.get(subject)

    def _receive(self, pipe: Connection) -> None:
        subject, ended, found, slopes, events = pipe.recv()
        self._begun.add(subject)
        if ended:
            self._ended[subject] = found
        self._costs.slopes.update(slopes)
        for batch, parts in events.items():
            self._costs.cache.events.setdefault(batch, {}).update(parts)


@dataclass
class _Told:
    """What a process has told of what it found out."""

    costs: LayoutCosts
    pipe: Connection

    def __post_init__(self) -> None:
        self._slopes = set(self.costs.slopes)
        self._events = {batch: set(parts) for batch, parts in self.costs.cache.events.items()}
        self._messages: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._send, name="told", daemon=True).start()

    def _send(self) -> None:
        """The search may be busy for long, and a pipe holds little."""
        with suppress(OSError):
            while True:
                self.pipe.send(self._messages.get())

    def begins(self, subject: Subject) -> None:
        self._messages.put((subject, False, None, {}, {}))

    def ends(self, subject: Subject, found: Any = None) -> None:
        """With what is new."""
        fresh = {}
        for batch, parts in self.costs.cache.events.items():
            known = self._events.setdefault(batch, set())
            if new := {part: events for part, events in parts.items() if part not in known}:
                known.update(new)
                fresh[batch] = new
        slopes = {key: self.costs.slopes[key] for key in self.costs.slopes.keys() - self._slopes}
        self._slopes.update(slopes)
        self._messages.put((subject, True, found, slopes, fresh))


def _find(
    costs: LayoutCosts,
    families: Sequence[Candidate[Any]],
    bounded: Bounded,
    most: int | None,
    claims: _Claims,
    pipe: Connection,
    parent: int,
) -> None:
    end_with_parent(parent)
    with suppress(Exception):  # the search has ended; it will meet the same error itself
        told, expected = _Told(costs, pipe), _Expected(pipe, costs)
        _time_all(costs, families, bounded, most, claims, told, expected)
        _measure_expected(costs, told, expected)
    os._exit(0)


class _Expected:
    """Layouts that the search expects to measure, as it said last, and what it has found itself."""

    def __init__(self, pipe: Connection, costs: LayoutCosts) -> None:
        self._pipe, self._costs = pipe, costs
        self.layouts: list[Layout] = []
        self.known = set[int]()
        """Hashes of parts that the search has measured, which are those of a fork."""

    def read(self) -> bool:
        """Whether it expects others."""
        anew = False
        while self._pipe.poll():
            anew = self.wait() or anew
        return anew

    def wait(self) -> bool:
        """The same, once it says anything."""
        layouts, parts, times = self._pipe.recv()
        self.known.update(parts)
        self._costs.known_times.update(times)
        self.layouts = self.layouts if layouts is None else layouts
        return layouts is not None


def _time_all(
    costs: LayoutCosts,
    families: Sequence[Candidate[Any]],
    bounded: Bounded,
    most: int | None,
    claims: _Claims,
    told: _Told,
    expected: _Expected,
) -> None:
    """Measures what bounds the memory of families' layouts and times their layers, those with the lowest bounds
    first."""
    timed = 0

    def refine(candidate: Candidate[Any]) -> Iterator[Candidate[Any]]:
        nonlocal timed
        family = candidate.item
        expected.read()
        while family != family.plain and claims.taken(family.plain) and family.plain not in costs.known_times:
            expected.wait()  # for its times, which bound this family
        told.begins(("bounds", family))
        again = bounded(candidate)
        told.ends(("bounds", family))
        if again is None:
            return
        if again.bound > candidate.bound:
            yield again
            return
        if timed == most:
            yield replace(candidate, final=True)
            return
        timed += 1
        if claims.take(family):
            told.begins(("times", family))
            told.ends(("times", family), costs.times(family))

    next(best_first(families, refine), None)


class _AnewError(Exception):
    """The search expects something else."""


def _measure_expected(costs: LayoutCosts, told: _Told, expected: _Expected) -> None:
    """Measures what the layers of expected layouts hold, until this process is ended."""

    def found(part: Hashable, measure: Callable[[], Any]) -> Any:
        if expected.read():
            raise _AnewError
        if hash(part) in expected.known:
            return NOTHING_HELD  # the sums are of no use here
        told.begins(("memory", part))
        memory = measure()
        told.ends(("memory", part), memory)
        return memory

    costs.plans.found = found
    while True:
        while not expected.layouts:
            expected.wait()
        with suppress(_AnewError):
            costs.measure_layers(expected.layouts.pop(0))
