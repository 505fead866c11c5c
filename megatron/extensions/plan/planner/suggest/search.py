"""Search for the fastest layouts of a run that fit the memory of its devices. torch is imported only when a layout must
be measured."""

from __future__ import annotations

import gc
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Generic, TypeVar

from megatron.extensions.plan.planner.memory import GIB, RankMemory, fullest
from megatron.extensions.plan.planner.suggest.costs import LayoutCosts
from megatron.extensions.plan.planner.suggest.space import OFFLOADING, RECOMPUTATION, SHARDING, Family, Layout, Saving
from megatron.extensions.plan.planner.time.step_time import StepTime
from megatron.training.config.run_config import RunConfig

NEAREST_MEASURED = 3
"""Number of layouts, with the lowest memory bounds, that a search measures if no layout fits. The search reports the
layout that exceeds the memory limit by the least."""

MOST_PREDICTED = 150
"""Number of predictions after which an incomplete search predicts only memory-saving variants of the layouts found so
far."""

MOST_OF_A_SHAPE = 6
"""Number of layouts per `Layout.shape` that an incomplete search predicts. The search predicts the layouts with the
lowest time bounds."""

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """Candidate of a search, with a lower bound on its cost. `order` breaks ties between equal bounds."""

    bound: float
    order: tuple[object, ...]
    item: T
    final: bool = False
    """True if `bound` is the exact cost rather than a lower bound."""


def best_first(
    candidates: Iterable[Candidate[T]],
    refine: Callable[[Candidate[T]], Iterable[Candidate[T]]],
) -> Iterator[Candidate[T]]:
    """Yield final candidates in order of cost, with ties broken by `order`.

    A heap orders the candidates by a lower bound on their cost. A final candidate at the top of the heap is the next
    result. As in A* (Hart, Nilsson and Raphael, 1968), candidates whose bound exceeds the cost of the last result are
    never refined.

    `refine` receives the first candidate that is not final, and returns the candidates that replace it. If a new
    candidate has a smaller bound than the candidate that it replaces, its bound is raised to the bound of the replaced
    candidate. All candidates with a bound equal to the cost of a result are refined before the result is yielded, so
    that `order` can break ties.
    """
    heap = [(each.bound, each.final, each.order, number, each) for number, each in enumerate(candidates)]
    heapq.heapify(heap)
    count = len(heap)
    while heap:
        bound, *_, first = heapq.heappop(heap)
        if first.final:
            yield first
            continue
        for each in refine(first):
            heapq.heappush(heap, (max(bound, each.bound), each.final, each.order, count, each))
            count += 1


@dataclass(frozen=True)
class Found:
    """Legal layout with its predicted step and its memory by pipeline rank; the memory is empty until it is
    measured."""

    layout: Layout
    config: RunConfig
    step: StepTime
    memory: tuple[RankMemory, ...] = ()
    given: bool = False
    """True if this layout is the one that the run's flags describe."""

    @property
    def host(self) -> int:
        """Host memory in bytes of the rank that uses the most host memory."""
        return max(rank.host for rank in self.memory)

    @property
    def fullest(self) -> RankMemory:
        """Pipeline rank with the most memory."""
        return fullest(self.memory)


def ranked_with(own: Found, found: list[Found]) -> list[Found]:
    """Rank layouts by time, fastest first. The ranking includes the run's own layout.

    The run's own layout precedes other layouts with the same step time. Other layouts with the same `Layout.shape` as
    the run's own layout are omitted unless they are faster.
    """
    faster = [each for each in found if each.step.seconds < own.step.seconds]
    return [*faster, own, *(each for each in found[len(faster) :] if each.layout.shape != own.layout.shape)]


Item = Family | Layout | Found


@dataclass
class Effort:
    """Statistics about a search."""

    families: int = 0
    traced: int = 0
    """Number of layout families (`Family`) whose layers were timed."""

    layouts: int = 0
    """Number of layouts for which a memory bound was computed, including memory-saving variants."""

    predicted: int = 0
    measured: int = 0

    beyond_host: int = 0
    """Number of measured layouts whose offloaded data does not fit in host memory."""

    bound: float | None = None
    """Lower bound on the step time of the layouts that were not evaluated; None if all layouts were evaluated."""

    interrupted: bool = False
    """True if the search was interrupted before it finished."""


@dataclass
class LayoutSearch:
    """Search over the layouts of one run."""

    costs: LayoutCosts
    limit: int
    """Device memory in bytes."""

    most_timed: int | None = None
    """Maximum number of layout families (`Family`) whose layers are timed; None to evaluate every family. Families are
    timed in ascending order of their lower bounds. If the number is limited, only `MOST_OF_A_SHAPE` layouts per shape
    are predicted."""

    progress: Callable[[Effort], None] = lambda effort: None
    """Function that is called at every step of the search."""

    effort: Effort = field(default_factory=Effort)
    _of_shape: Counter[tuple[object, ...]] = field(default_factory=Counter)
    _found: dict[tuple[object, ...], Found] = field(default_factory=dict)
    _fitting: dict[Family, list[Layout]] = field(default_factory=dict)
    """Layouts of each family that may fit and have not been tried."""

    _sizes: dict[Layout, float] = field(default_factory=dict)
    """Lower bound on the bytes of each layout that has been tried; infinite if the layout does not fit in host
    memory."""

    def best(self, count: int) -> list[Found]:
        """Return up to `count` layouts that fit, fastest first. Only the fastest layout of each `Layout.shape` is
        returned.

        Raises ValueError if the device file lacks a rate that the search needs.
        """
        families = list(self._families())
        gc.freeze()  # afterwards, garbage collection skips all objects that already exist
        try:
            for candidate in best_first(families, self._refine):
                assert isinstance(candidate.item, Found)
                self._found.setdefault(candidate.item.layout.shape, candidate.item)
                if len(self._found) == count:
                    break
        finally:
            gc.unfreeze()
        return list(self._found.values())

    def end_early(self) -> None:
        """End a running search as soon as possible. The search then returns the fastest fitting layouts among the
        predicted layouts and their memory-saving variants."""
        self.effort.interrupted = True

    def _leave_out(self, bound: float) -> None:
        self.effort.bound = bound if self.effort.bound is None else min(bound, self.effort.bound)

    def nearest(self) -> Found | None:
        """Return the legal layout whose fullest rank exceeds the memory limit by the least; None if no layout is legal.
        The report names this nearest layout if no layout fits."""
        too_large = [layout for layout, size in self._sizes.items() if self.limit < size < inf]
        too_large.sort(key=lambda layout: (self._sizes[layout], layout.order))
        legal = (
            (layout, config) for layout in too_large if self.costs.legal(config := self.costs.run.with_layout(layout))
        )
        found = [
            Found(layout, config, self.costs.step(config), tuple(self.costs.memory(config)))
            for layout, config in islice(legal, NEAREST_MEASURED)
        ]
        return min(found, key=lambda each: each.fullest.total, default=None)

    def _families(self) -> Iterator[Candidate[Item]]:
        for family in self.costs.run.space.families():
            if self.costs.divides(family.tp, family.cp, family.ep, family.expert_tp):
                self.effort.families += 1
                order = (0, *family._replace(recompute=""), RECOMPUTATION.index(family.recompute))
                yield Candidate(self.costs.family_bound(family), order, family)

    def _refine(self, candidate: Candidate[Item]) -> Iterator[Candidate[Item]]:
        item, bound = candidate.item, candidate.bound
        self.progress(self.effort)
        if isinstance(item, Found):
            if item.layout.shape not in self._found:  # a faster layout of the same shape replaces this one
                yield from self._measured(item)
        elif self.effort.interrupted or (self.most_timed is not None and self.effort.predicted >= MOST_PREDICTED):
            self._leave_out(bound)
        elif isinstance(item, Family):
            yield from self._layouts(item, candidate)
        elif item.shape not in self._found:
            if self.most_timed is not None and self._of_shape[item.shape] >= MOST_OF_A_SHAPE:
                self._leave_out(bound)
            else:
                yield from self._predicted(item)

    def _layouts(self, family: Family, candidate: Candidate[Item]) -> Iterator[Candidate[Item]]:
        """Return the layouts of a family that may fit. Each layout uses only the memory-saving settings that it needs.

        The lower bound on the family's step time may have risen since the candidate was created. In this case, return
        the family itself with the new bound instead.
        """
        again = self.costs.family_bound(family)
        if again <= candidate.bound:
            if family not in self._fitting:
                every = self.costs.run.space.layouts(family)
                self._fitting[family] = [each for layout in every for each in self._may_fit(layout)]
            again = min((self.costs.untimed_bound(each, again) for each in self._fitting[family]), default=inf)
        if candidate.bound < again < inf:
            yield replace(candidate, bound=again)
        elif self._fitting[family]:
            if self.effort.traced == self.most_timed:
                self._leave_out(candidate.bound)
                return
            self.effort.traced += 1
            yield from map(self._bounded, self._fitting.pop(family))

    def _bounded(self, layout: Layout) -> Candidate[Item]:
        return Candidate(self.costs.time_bound(layout), (1, layout.order), layout)

    def _predicted(self, layout: Layout) -> Iterator[Candidate[Item]]:
        """Predict the step of a layout. If the states of the layout cannot fit, return variants that save more memory
        instead. If the layout is illegal, return nothing."""
        config = self.costs.run.with_layout(layout)
        if not self.costs.legal(config):
            return
        self._sizes[layout] = self.costs.close_memory_bound(layout)
        if self._sizes[layout] > self.limit:
            yield from map(self._bounded, self._savings(layout))
            return
        self._of_shape[layout.shape] += 1
        self.effort.predicted += 1
        timed = Found(layout, config, self.costs.step(config))
        yield Candidate(timed.step.seconds, (2, layout.order), timed)

    def _may_fit(self, layout: Layout) -> Iterator[Layout]:
        """Return the layout if its memory bound is within the limit. Otherwise, return the layout's next memory-saving
        variants that may fit."""
        if layout in self._sizes:
            return
        self.effort.layouts += 1
        self._sizes[layout] = self.costs.memory_bound(layout)
        if self._sizes[layout] <= self.limit:
            yield layout
        elif layout.saving != Saving() or self._may_fit_at_all(layout):
            yield from self._savings(layout)

    def _may_fit_at_all(self, layout: Layout) -> bool:
        """Return True if the layout may fit with the settings that save the most memory."""
        sharding = SHARDING[-1] if layout.replicas > 1 else SHARDING[0]
        most = [layout._replace(saving=Saving(sharding, offload)) for offload in OFFLOADING[1:]]
        sizes = {each: self.costs.memory_bound(each) for each in most}
        if min(sizes.values()) <= self.limit:
            return True
        self._sizes |= sizes
        return False

    def _savings(self, layout: Layout) -> Iterator[Layout]:
        for saving in layout.saving.next(layout.replicas):
            yield from self._may_fit(layout._replace(saving=saving))

    def _measured(self, timed: Found) -> Iterator[Candidate[Item]]:
        """Measure the memory of a layout. Return the layout if it fits; otherwise, return variants that save more
        memory."""
        self.effort.measured += 1
        found = replace(timed, memory=tuple(self.costs.memory(timed.config)))
        host = self.costs.device.host_memory_gib
        self._sizes[timed.layout] = found.fullest.total
        if host is not None and found.host > host * GIB:
            self.effort.beyond_host += 1
            self._sizes[timed.layout] = inf
        elif found.fullest.total <= self.limit:
            yield Candidate(timed.step.seconds, (3, timed.layout.order), found, final=True)
            return
        elif (chunked := self.costs.chunked(timed.config, timed.step, found.memory)) is not None:
            found = replace(found, config=chunked.config, step=chunked.step, memory=chunked.memory)
            if found.fullest.total <= self.limit:
                yield Candidate(found.step.seconds, (3, timed.layout.order), found, final=True)
        for layout in self._savings(timed.layout):
            yield from self._predicted(layout)
