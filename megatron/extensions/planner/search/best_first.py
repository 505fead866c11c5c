"""Best-first search with bounds that are refined step by step. No torch.

Candidates wait in a heap, ordered by a lower bound on their cost. The first one is refined: it gives way to others with
higher bounds, or its bound is its cost. So what leaves the heap with its cost is the next best, and nothing whose bound
is above the last result's cost is ever refined further (A*; Hart, Nilsson and Raphael, 1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """A candidate and a lower bound on its cost. `order` decides between equal bounds."""

    bound: float
    order: tuple[object, ...]
    item: T
    final: bool = False
    """Whether `bound` is the cost."""


class Waiting(Generic[T]):
    """The candidates of a search that are not refined yet."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, bool, tuple[object, ...], int, Candidate[T]]] = []

    def next(self, count: int) -> list[Candidate[T]]:
        """The first ones."""
        return [candidate for *_, candidate in heapq.nsmallest(count, self.heap)]


def best_first(
    candidates: Iterable[Candidate[T]],
    refine: Callable[[Candidate[T]], Iterable[Candidate[T]]],
    waiting: Waiting[T] | None = None,
) -> Iterator[Candidate[T]]:
    """Yields final candidates by their cost, then their order.

    `refine` is given the first candidate that is not final, and returns what takes its place; a bound below that of
    what it refines is raised to it. Equal bounds are refined before a result leaves, so that ties are decided by order.
    `waiting` shows what comes next.
    """
    heap = (waiting or Waiting[T]()).heap
    heap += [(each.bound, each.final, each.order, number, each) for number, each in enumerate(candidates)]
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
