"""The search for the fastest layouts of a run that fit the memory of its devices."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf

from megatron.planner.search.best_first import Candidate, best_first
from megatron.planner.search.layouts import RECOMPUTATION, Family, Layout
from megatron.planner.time.step_time import StepTime
from megatron.training.config.dry_run.memory import RankMemory
from megatron.training.config.run_config import RunConfig
from megatron.training.config.suggest.ahead import timed_ahead
from megatron.training.config.suggest.costs import LayoutCosts

NEAREST_MEASURED = 3
"""Where nothing fits, so many layouts with the lowest bounds on memory are measured to name the nearest one."""


MOST_OF_A_SHAPE = 4
"""A search that may end early predicts so many layouts of one `Layout.shape`, those with the lowest bounds."""


@dataclass(frozen=True)
class Timed:
    """A legal layout with its predicted step."""

    layout: Layout
    config: RunConfig
    step: StepTime


@dataclass(frozen=True)
class Found(Timed):
    """A layout with its predicted step and its memory by pipeline rank."""

    memory: tuple[RankMemory, ...]
    given: bool = False
    """Whether it is the run's own."""

    @property
    def fullest(self) -> RankMemory:
        """The rank that holds most."""
        return max(self.memory, key=lambda rank: rank.total)


def ranked_with(own: Found, found: list[Found]) -> list[Found]:
    """Layouts by time, the fastest first, with a run's own among them. It comes before others that take as long, and
    stands for those of its shape that are no faster."""
    faster = [each for each in found if each.step.seconds < own.step.seconds]
    return [*faster, own, *(each for each in found[len(faster) :] if each.layout.shape != own.layout.shape)]


Item = Family | Layout | Timed


@dataclass
class Effort:
    """What a search took."""

    families: int = 0
    traced: int = 0
    """Families whose layers were timed."""

    layouts: int = 0
    """Layouts of those, and their ways of saving memory, whose memory was bounded."""

    predicted: int = 0
    measured: int = 0

    bound: float | None = None
    """Where a search ended early: seconds of a step below which no layout can go that it has not come to."""


@contextmanager
def _few_collections() -> Iterator[None]:
    """Garbage collection that leaves out what there was before, which is most: a tenth of a search."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _EnoughError(Exception):
    """The search ends early. `bound` is that of the layout that comes next."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound


@dataclass
class LayoutSearch:
    """Searches the layouts of one run."""

    costs: LayoutCosts
    limit: int
    """Bytes of a device."""

    most_predicted: int | None = None
    """After so many predictions the search ends early, with the fastest of the layouts that it has come to."""

    effort: Effort = field(default_factory=Effort)
    _predicted: list[Timed] = field(default_factory=list)
    _of_shape: Counter[tuple[object, ...]] = field(default_factory=Counter)
    _passed_over: float = inf
    """The lowest bound of the layouts that were passed over as enough of their shape had been predicted."""

    _found: dict[tuple[object, ...], Found] = field(default_factory=dict)
    _tried: set[Layout] = field(default_factory=set)
    _too_large: list[tuple[int, tuple[object, ...], Layout]] = field(default_factory=list)

    def best(self, count: int) -> list[Found]:
        """The fastest layouts that fit, the fastest first, one of each `Layout.shape`. Raises ValueError where the
        device file lacks a rate."""
        families = list(self._families())
        with _few_collections(), timed_ahead(self.costs, families, self._bounded):
            return self._searched(families, count)

    def _searched(self, families: Sequence[Candidate[Item]], count: int) -> list[Found]:
        try:
            for candidate in best_first(families, self._refine):
                assert isinstance(candidate.item, Found)
                self._found.setdefault(candidate.item.layout.shape, candidate.item)
                if len(self._found) == count:
                    break
            else:
                self.effort.bound = None if self._passed_over == inf else self._passed_over
        except _EnoughError as enough:
            self.effort.bound = enough.bound
            self._take_known(count)
        return list(self._found.values())

    def _take_known(self, count: int) -> None:
        """Ends early: finds the fastest that fit among the predicted layouts and what saves more memory in them."""
        self.most_predicted = None
        known: list[Candidate[Item]] = [Candidate(t.step.seconds, (2, t.layout.order), t) for t in self._predicted]
        for candidate in best_first(known, self._refine):
            assert isinstance(candidate.item, Found)
            self._found.setdefault(candidate.item.layout.shape, candidate.item)
            if len(self._found) == count:
                break

    def nearest(self) -> Found | None:
        """Where nothing fits, the legal layout whose fullest rank exceeds the limit least; None if none is legal."""
        best: Found | None = None
        measured = 0
        for _, _, layout in sorted(self._too_large):
            config = self.costs.run.with_layout(layout)
            if not self.costs.legal(config):
                continue
            found = Found(layout, config, self.costs.step(config), tuple(self.costs.memory(config)))
            if best is None or found.fullest.total < best.fullest.total:
                best = found
            measured += 1
            if measured == NEAREST_MEASURED:
                break
        return best

    def _families(self) -> Iterator[Candidate[Item]]:
        for family in self.costs.run.space.families():
            if self.costs.divides(family.tp, family.cp, family.ep, family.expert_tp):
                self.effort.families += 1
                yield self._bounded(family)

    def _bounded(self, family: Family) -> Candidate[Item]:
        order = (0, *family._replace(recompute=""), RECOMPUTATION.index(family.recompute))
        return Candidate(self.costs.family_bound(family), order, family)

    def _refine(self, candidate: Candidate[Item]) -> Iterator[Candidate[Item]]:
        item = candidate.item
        if isinstance(item, Family):
            again = self._bounded(item)  # more may be known by now
            yield from iter([again]) if again.bound > candidate.bound else self._layouts(item)
        elif (item.layout if isinstance(item, Timed) else item).shape in self._found:
            return  # a faster one stands for it
        elif isinstance(item, Timed):
            yield from self._measured(item, candidate.bound)
        else:
            config = self.costs.run.with_layout(item)
            if self.costs.legal(config):
                if self.most_predicted is not None:
                    if self.effort.predicted == self.most_predicted:
                        raise _EnoughError(min(candidate.bound, self._passed_over))
                    self._of_shape[item.shape] += 1
                    if self._of_shape[item.shape] > MOST_OF_A_SHAPE:
                        self._passed_over = min(self._passed_over, candidate.bound)
                        return
                self.effort.predicted += 1
                timed = Timed(item, config, self.costs.step(config))
                self._predicted.append(timed)
                yield Candidate(timed.step.seconds, (2, item.order), timed)

    def _layouts(self, family: Family) -> Iterator[Candidate[Item]]:
        """The layouts of a family that may fit, each with the least saving that lets it."""
        if self.costs.ahead is not None:
            self.costs.ahead(family)
        fitting = [each for layout in self.costs.run.space.layouts(family) for each in self._may_fit(layout)]
        self.effort.traced += bool(fitting)
        for layout in fitting:
            yield Candidate(self.costs.time_bound(layout), (1, layout.order), layout)

    def _may_fit(self, layout: Layout) -> Iterator[Layout]:
        """The layout if the bound on its memory allows it, otherwise what saves more, in the same way."""
        if layout in self._tried:
            return
        self._tried.add(layout)
        self.effort.layouts += 1
        bound = self.costs.memory_bound(layout)
        if bound <= self.limit:
            yield layout
            return
        self._note_too_large(bound, layout)
        yield from self._savings(layout)

    def _savings(self, layout: Layout) -> Iterator[Layout]:
        for saving in layout.saving.next(layout.dp * layout.family.cp):
            yield from self._may_fit(layout._replace(saving=saving))

    def _measured(self, timed: Timed, seconds: float) -> Iterator[Candidate[Item]]:
        self.effort.measured += 1
        found = Found(timed.layout, timed.config, timed.step, tuple(self.costs.memory(timed.config)))
        if found.fullest.total <= self.limit:
            yield Candidate(seconds, (3, timed.layout.order), found, final=True)
            return
        self._note_too_large(found.fullest.total, timed.layout)
        for layout in self._savings(timed.layout):
            yield Candidate(seconds, (1, layout.order), layout)

    def _note_too_large(self, size: int, layout: Layout) -> None:
        self._too_large.append((size, layout.order, layout))
        if len(self._too_large) > 1000:
            self._too_large = nsmallest(100, self._too_large)
