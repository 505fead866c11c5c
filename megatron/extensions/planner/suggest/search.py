"""The search for the fastest layouts of a run that fit the memory of its devices."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from math import inf

from megatron.extensions.planner.dry_run.memory import RankMemory
from megatron.extensions.planner.suggest.bounds import Candidate, best_first
from megatron.extensions.planner.suggest.costs import LayoutCosts
from megatron.extensions.planner.suggest.layouts import OFFLOADING, RECOMPUTATION, SHARDING, Family, Layout, Saving
from megatron.extensions.planner.time.step_time import StepTime
from megatron.training.config.run_config import RunConfig

NEAREST_MEASURED = 3
"""Layouts that are measured to name the nearest one if nothing fits: those with the lowest bounds on memory."""


MOST_OF_A_SHAPE = 4
"""Layouts of one `Layout.shape` that a search that may end early predicts: those with the lowest bounds."""


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
    def host(self) -> int:
        """Bytes of host memory of the rank that takes most."""
        return max(rank.host for rank in self.memory)

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

    bounded_closely: int = 0
    """Of those, the ones whose states were planned, as they were next by their bound on the time."""

    predicted: int = 0
    measured: int = 0

    beyond_host: int = 0
    """Of those measured, what they offload does not fit the host's memory."""

    bound: float | None = None
    """After a search that ended early: a lower bound on the step time of every layout that it did not evaluate."""

    interrupted: bool = False
    """Whether it was asked to end."""


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
    """Number of predictions after which the search ends early, with the fastest layout found so far."""

    most_timed: int | None = None
    """Number of families whose layers are timed, those with the lowest bounds; others are left out."""

    progress: Callable[[Effort], None] = lambda effort: None
    """Is called at every step of the search."""

    effort: Effort = field(default_factory=Effort)
    _asked_to_end: bool = False
    _predicted: list[Timed] = field(default_factory=list)
    _of_shape: Counter[tuple[object, ...]] = field(default_factory=Counter)
    _passed_over: float = inf
    """The lowest bound of the layouts left out, as enough families were timed or layouts of a shape predicted."""

    _fitting: dict[Family, list[Layout]] = field(default_factory=dict)
    """The layouts of a family that may fit, until they are taken."""

    _found: dict[tuple[object, ...], Found] = field(default_factory=dict)
    _tried: set[Layout] = field(default_factory=set)
    _too_large: list[tuple[int, tuple[object, ...], Layout]] = field(default_factory=list)

    def best(self, count: int) -> list[Found]:
        """The fastest layouts that fit, the fastest first, one of each `Layout.shape`. Raises ValueError where the
        device file lacks a rate."""
        families = list(self._families())
        with _few_collections():
            return self._searched(families, count)

    def end_early(self) -> None:
        """Ends a search that runs, as soon as it can, with the fastest of the layouts that it has come to."""
        self._asked_to_end = True

    def _searched(self, families: Sequence[Candidate[Item]], count: int) -> list[Found]:
        try:
            self._take(families, count)
            self.effort.bound = None if self._passed_over == inf else self._passed_over
        except _EnoughError as enough:
            # Ends early: the fastest that fit among the predicted layouts and what saves more memory in them.
            self.effort.bound, self.most_predicted = enough.bound, None
            known = [Candidate[Item](t.step.seconds, (2, t.layout.order), t) for t in self._predicted]
            self._take(known, count)
        return list(self._found.values())

    def _take(self, candidates: Sequence[Candidate[Item]], count: int) -> None:
        """Adds the best to what is found, until these are `count`."""
        for candidate in best_first(candidates, self._refine):
            assert isinstance(candidate.item, Found)
            self._found.setdefault(candidate.item.layout.shape, candidate.item)
            if len(self._found) == count:
                break

    def nearest(self) -> Found | None:
        """The legal layout whose fullest rank exceeds the limit least, for when nothing fits; None if none is legal."""
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
        self.progress(self.effort)
        if self._asked_to_end and not self.effort.interrupted:
            self.effort.interrupted = True
            raise _EnoughError(min(candidate.bound, self._passed_over))
        if isinstance(item, Family):
            if self.effort.traced == self.most_timed:
                self._passed_over = min(self._passed_over, candidate.bound)
                return
            again = self._bounded_again(candidate)
            if again is not None:
                yield from iter([again]) if again.bound > candidate.bound else self._layouts(item)
        elif (item.layout if isinstance(item, Timed) else item).shape in self._found:
            return  # a faster one stands for it
        elif isinstance(item, Timed):
            yield from self._measured(item, candidate.bound)
        else:
            yield from self._timed(item, candidate.bound)

    def _timed(self, layout: Layout, bound: float) -> Iterator[Candidate[Item]]:
        """The layout with its predicted step, if its planned states may fit, otherwise what saves more."""
        if self.most_predicted is not None and self._of_shape[layout.shape] == MOST_OF_A_SHAPE:
            self._passed_over = min(self._passed_over, bound)
            return
        config = self.costs.run.with_layout(layout)
        if not self.costs.legal(config):
            return
        self.effort.bounded_closely += 1
        size = self.costs.close_memory_bound(layout, config)
        if size > self.limit:
            self._note_too_large(size, layout)
            for saving in self._savings(layout):
                yield Candidate(bound, (1, saving.order), saving)
            return
        if self.effort.predicted == self.most_predicted:
            raise _EnoughError(min(bound, self._passed_over))
        self._of_shape[layout.shape] += 1
        self.effort.predicted += 1
        timed = Timed(layout, config, self.costs.step(config))
        self._predicted.append(timed)
        yield Candidate(timed.step.seconds, (2, layout.order), timed)

    def _bounded_again(self, candidate: Candidate[Item]) -> Candidate[Item] | None:
        """A family with the bound that is known by now; None if no layout of it fits."""
        family = candidate.item
        assert isinstance(family, Family)
        again = self._bounded(family)
        if again.bound > candidate.bound:
            return again
        if family not in self._fitting:
            every = self.costs.run.space.layouts(family)
            self._fitting[family] = [each for layout in every for each in self._may_fit(layout)]
        fitting = self._fitting[family]
        if not fitting:
            return None
        bound = min(self.costs.untimed_bound(layout, again.bound) for layout in fitting)
        return replace(again, bound=max(again.bound, bound))

    def _layouts(self, family: Family) -> Iterator[Candidate[Item]]:
        """The layouts of a family that may fit, each with the least saving that lets it."""
        fitting = self._fitting.pop(family)
        self.effort.traced += 1
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
        if layout.saving == Saving():
            most = [self.costs.memory_bound(each) for each in self._most_saving(layout)]
            if min(most) > self.limit:
                for size, each in zip(most, self._most_saving(layout), strict=True):
                    self._note_too_large(size, each)
                return
        yield from self._savings(layout)

    def _most_saving(self, layout: Layout) -> list[Layout]:
        """A layout with what saves most memory."""
        sharding = SHARDING[-1] if layout.dp * layout.family.cp > 1 else SHARDING[0]
        return [layout._replace(saving=Saving(sharding, offload)) for offload in OFFLOADING[1:]]

    def _savings(self, layout: Layout) -> Iterator[Layout]:
        for saving in layout.saving.next(layout.dp * layout.family.cp):
            yield from self._may_fit(layout._replace(saving=saving))

    def _measured(self, timed: Timed, seconds: float) -> Iterator[Candidate[Item]]:
        self.effort.measured += 1
        found = Found(timed.layout, timed.config, timed.step, tuple(self.costs.memory(timed.config)))
        host = self.costs.device.host_memory_gib
        if host is not None and found.host > host * 2**30:
            self.effort.beyond_host += 1
        elif found.fullest.total <= self.limit:
            yield Candidate(seconds, (3, timed.layout.order), found, final=True)
            return
        else:
            self._note_too_large(found.fullest.total, timed.layout)
        for layout in self._savings(timed.layout):
            yield Candidate(seconds, (1, layout.order), layout)

    def _note_too_large(self, size: int, layout: Layout) -> None:
        self._too_large.append((size, layout.order, layout))
        if len(self._too_large) > 1000:
            self._too_large = nsmallest(100, self._too_large)
