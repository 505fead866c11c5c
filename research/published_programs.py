"""Model a training step of published programs: convert the events that this program's planner predicts into the events
of the published program.

A plan assumes the kernels of this program. The programs that were published in 2021 and 2022 stored the attention
scores, accumulated weight gradients in a separate kernel, and computed the loss in several passes over fp32 logits.
All modeled differences come from the code of these programs, and none is fitted to their step times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron.core.pipeline_parallel.layout import Stage
from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.micro_batch import MicroBatch
from megatron.extensions.plan.planner.time.events import Attention, Collective, Event, Move, PassEvents, Product, Wait


@dataclass(frozen=True)
class Program:
    """Differences between a published program and this one."""

    keeps_scores: bool = False
    """True if attention computes the whole score matrix with 16-bit GEMMs, and applies causal softmax and dropout in
    separate kernels."""

    adds_apart: bool = False
    """True if a GEMM writes each weight gradient in 16 bits, and a separate kernel adds it to the fp32 gradient."""

    waits_at_once: bool = False
    """True if no tensor-parallel collective overlaps with a GEMM."""

    loss_in_passes: bool = False
    """True if the loss over a sharded vocabulary copies the logits to fp32 and reads the copy several times."""

    def events(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events with which the published program runs a forward or backward pass."""
        waited = set[int]()
        for event in events:
            if isinstance(event, Wait) and event.number in waited:
                continue
            if self.keeps_scores and isinstance(event, Attention):
                yield from attention_with_scores(event)
            elif self.adds_apart and isinstance(event, Product) and event.sums:
                gradient = 2 * event.batches * event.m * event.n
                yield replace(event, sums=0, moved=event.moved + gradient)
                yield Move(event.sums + gradient)
            elif self.waits_at_once and isinstance(event, Collective) and event.axis == "tp":
                waited.add(event.number)
                yield from (event, Wait(event.number))
            else:
                yield event

    def passes(self, part: PassEvents, head: bool) -> PassEvents:
        """Return the forward and backward events with which the published program runs one part of a pipeline stage.
        Pass `head=True` if the part includes the output layer."""
        forward, backward = list(self.events(part.forward)), list(self.events(part.backward))
        if head and self.loss_in_passes:
            product = next(event for event in part.forward if isinstance(event, Product))
            logits = product.m * product.n
            forward += [Move(logits * size) for size in PASSES_OF_LOSS]
            backward = [*(Move(logits * size) for size in PASSES_OF_GRADIENT), *backward]
        weight = tuple(self.events(part.weight))
        return replace(part, forward=tuple(forward), backward=tuple(backward), weight=weight)


THIS = Program()
"""`Program` that does not differ from this program. This is the default of `PublishedRun.program`."""

PASSES_OF_LOSS = 6 - 2, 4, 8, 8, 4, 8
"""Bytes per logit in six passes: conversion to fp32, maximum, subtraction, exponential, sum and division. A number
after a minus sign is subtracted because the plan already counts these bytes for this program's loss kernel."""

PASSES_OF_GRADIENT = 8 - 4, 6
"""Bytes per logit in two passes: multiplication by the loss gradient, and conversion to 16 bits. The number after the
minus sign is subtracted because the plan already counts these bytes for this program's loss kernel."""


def attention_with_scores(event: Attention) -> list[Event]:
    """Convert a fused attention event to the events of unfused attention, which computes the whole score matrix with
    GEMMs. The numbers of heads and tokens stay the same.

    The events count the bytes that each kernel moves. The softmax reads the unmasked half of the matrix and writes the
    whole matrix. The backward pass of the softmax reads the unmasked halves of two matrices and writes a whole matrix.
    Dropout reads and writes the whole matrix. It also writes the dropout mask in the forward pass, and reads the mask
    in the backward pass.
    """
    length, width = event.length, event.width
    pairs = event.flops / ((10 if event.backward else 4) * width)
    heads = round(2 * pairs / length**2)
    scores = heads * length**2

    def product(n: int, k: int) -> Product:
        moved = 2 * heads * (length * n + length * k + n * k)
        return Product("bf16", length, n, k, heads, moved)

    of_scores, of_values = product(length, width), product(width, length)
    if not event.backward:
        return [of_scores, Move(3 * scores), Move(5 * scores), of_values]
    return [of_values, of_scores, Move(5 * scores), Move(4 * scores), of_values, of_values]


@dataclass
class ProgramCache(PlannerCache):
    """Planner cache that converts the parts of a pipeline stage to the events of a published program."""

    program: Program = THIS
    made: dict[tuple[int, bool], tuple[PassEvents, PassEvents]] = field(default_factory=dict)
    """Cache of converted events. A key is a tuple of `id(part)` and a bool that is True if the part includes the output
    layer. `ProgramCache` keeps a reference to each part, so that the part's id is not reused."""

    def parts_of(self, batch: MicroBatch, stages: Sequence[Stage]) -> list[list[PassEvents]]:
        found = super().parts_of(batch, stages)
        return [self._of_stage(parts, stage) for parts, stage in zip(found, stages, strict=True)]

    def _of_stage(self, parts: list[PassEvents], stage: Stage) -> list[PassEvents]:
        return [self._part(part, stage.last and place == len(parts) - 1) for place, part in enumerate(parts)]

    def _part(self, part: PassEvents, head: bool) -> PassEvents:
        key = id(part), head
        if key not in self.made:
            self.made[key] = part, self.program.passes(part, head)
        return self.made[key][1]
