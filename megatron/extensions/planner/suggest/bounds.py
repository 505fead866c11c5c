"""Lower bounds on the step time and the memory of a layout, and the search that they guide. No torch.

Every bound leaves something out and adds nothing, so that none of the best layouts is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.extensions.planner.device_file import DeviceFile
from megatron.extensions.planner.time.replay import Attention, Event, Move, PassEvents, Product


class PassTimes(NamedTuple):
    """Seconds of one micro-batch: forward, backward (or the gradient of the input alone), deferred weight gradient."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, more: PassTimes) -> PassTimes:
        return PassTimes(*(a + b for a, b in zip(self, more, strict=True)))


def step_bound(
    stages: Sequence[PassTimes], layout: PipelineLayout, microbatches: int, more: Sequence[float] | None = None
) -> float:
    """Seconds that no schedule of these stages can go below. `more` is what each rank does beside its passes.

    The first forward of a rank waits for the stages before its own, and after the last backward of its own first stage
    those before it have theirs to do. Between the two a rank does all its work, except that deferred weight gradients
    may wait.
    """
    longest = 0.0
    for rank in range(layout.pp):
        own = layout.stages_of(rank)
        before = range(own[0])
        start = sum(stages[stage].forward for stage in before)
        after = sum(stages[stage].backward for stage in before)
        passes = sum(stages[stage].forward + stages[stage].backward for stage in own)
        weights = sum(stages[stage].weight for stage in own)
        ends = start + microbatches * (passes + weights), start + microbatches * passes + max(after, weights)
        longest = max(longest, max(ends) + (0.0 if more is None else more[rank]))
    return longest


@dataclass(frozen=True)
class StageParameters:
    """Elements of a stage's parameters in the whole model: dense ones, and those of experts."""

    dense: int = 0
    expert: int = 0


def states_bound(
    stages: Sequence[StageParameters], layout: PipelineLayout, cut: tuple[int, int], each: tuple[float, float]
) -> list[float]:
    """Bytes of states by pipeline rank, if every parameter is cut into as many parts as a matrix: `cut` and bytes
    `each` are those of dense parameters and of experts."""
    found = []
    for rank in range(layout.pp):
        own = [stages[stage] for stage in layout.stages_of(rank)]
        dense, expert = sum(stage.dense for stage in own), sum(stage.expert for stage in own)
        found.append(dense / cut[0] * each[0] + expert / cut[1] * each[1])
    return found


def ideal_seconds_of_a_sample(one: Sequence[PassEvents], two: Sequence[PassEvents], device: DeviceFile) -> float:
    """Seconds that the second sample adds, by what parts of a model do with one and with two samples. What they do once
    for all samples, as reading weights, is left out: in other layouts more samples share it.

    Products fill every multiprocessor, at the rate of their inner dimension, or of an endless one where that grows with
    the samples; nothing is launched, no kernel has a shortest time, and collectives take none."""
    device = replace(device, kernel_floor_us=0.0)
    first, second = _products(one), _products(two)
    alike = len(first) == len(second)
    pairs = list(zip(first, second, strict=True)) if alike else []
    products = sum(_product_us(b, a, device) - _product_us(a, b, device) for a, b in pairs)
    return 1e-6 * (max(0.0, products) + max(0.0, _others_us(two, device) - _others_us(one, device)))


def _events(parts: Sequence[PassEvents]) -> Iterator[Event]:
    return (event for part in parts for events in (part.forward, part.backward, part.weight) for event in events)


def _products(parts: Sequence[PassEvents]) -> list[Product]:
    return [event for event in _events(parts) if isinstance(event, Product)]


def _product_us(event: Product, other: Product, device: DeviceFile) -> float:
    """Microseconds of a product; `other` is the same one of another number of samples."""
    speed, flops = device.gemm[event.precision], 2.0 * event.batches * event.m * event.n * event.k
    filled = event.k / (event.k + speed.half_depth) if event.k == other.k else 1.0
    return flops / speed.tflops / filled / 1e6


def _others_us(parts: Sequence[PassEvents], device: DeviceFile) -> float:
    total = 0.0
    for event in _events(parts):
        if isinstance(event, Attention):
            total += device.attention_us(event.backend, event.width, event.flops, event.length, event.backward)
            total += device.hash_us(event.hashes)
        elif isinstance(event, Move):
            total += device.memory_us(event.moved)
    return total


T = TypeVar("T")


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """A candidate and a lower bound on its cost. `order` decides between equal bounds."""

    bound: float
    order: tuple[object, ...]
    item: T
    final: bool = False
    """Whether `bound` is the cost."""


def best_first(
    candidates: Iterable[Candidate[T]],
    refine: Callable[[Candidate[T]], Iterable[Candidate[T]]],
) -> Iterator[Candidate[T]]:
    """Yields final candidates by their cost, then their order.

    Candidates wait in a heap, ordered by a lower bound on their cost. What leaves it with its cost is the next best,
    and nothing whose bound is above the last result's cost is ever refined (A*; Hart, Nilsson and Raphael, 1968).

    `refine` is given the first candidate that is not final, and returns what takes its place; a bound below that of
    what it refines is raised to it. Equal bounds are refined before a result leaves, so that ties are decided by order.
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
