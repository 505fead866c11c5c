"""Division of training samples among context-parallel ranks, according to the documents in the samples. This module
also computes statistics of the work balance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import numpy as np

from megatron.core.attention.tiles import Documents, Shards, Spans
from megatron.extensions.data.packing.context_shards import (
    as_spans,
    balanced_shards,
    even_chunks,
    hybrid_shards,
    owners_of,
    score,
)


class Imbalance(NamedTuple):
    """Work imbalance of a micro-batch between context-parallel ranks."""

    before: float
    """Ratio of the busiest rank's work to the mean work per rank, under the default division."""

    after: float
    """Ratio of the busiest rank's work to the mean work per rank, under the actual division."""
    sent: float
    """Fraction of a rank's keys that the rank sends to other ranks."""


class Divider:
    """Callable that divides micro-batches over context-parallel ranks. The class implements the protocol
    `megatron.core.attention.tiles.DividesSequences`. If `hybrid` is True, documents with at most `longest` tokens stay
    on one rank. If `longest` is None, the limit with the lowest estimated cost is used. Groups of `inner` adjacent
    ranks exchange attention heads, so that all ranks of a group have the same work. Work therefore only has to be
    balanced between groups."""

    def __init__(self, hybrid: bool = False, longest: int | None = None, inner: int = 1) -> None:
        self.hybrid, self.longest = hybrid, longest
        self.inner = inner
        self.told: list[Imbalance] = []
        """Imbalances of the micro-batches that were divided since the last report."""

    def __call__(self, documents: Documents, seq_length: int, ranks: int) -> Shards:
        found = self.divided(documents, seq_length, ranks // self.inner)
        self.told.append(imbalance_of(found, documents, seq_length))
        return among_neighbours(found, self.inner)

    def divided(self, documents: Documents, seq_length: int, groups: int) -> Shards:
        """Divide samples among groups of ranks, and return one shard per group. `documents` contains the start
        positions of the documents in each sample."""
        if self.hybrid:
            return hybrid_shards(documents, seq_length, groups, self.longest)
        return balanced_shards(documents, seq_length, groups)


@lru_cache(maxsize=64)
def imbalance_of(shards: Shards, documents: Documents, seq_length: int) -> Imbalance:
    """Return the work imbalance between the context-parallel ranks that hold the given shards."""
    ranks = len(shards.held)
    usual, owners = even_chunks(seq_length, ranks), owners_of(shards, seq_length)
    before, after = (score(each, documents, ranks).work for each in (usual, owners))
    return Imbalance(before, after, sum(map(len, shards.sent[0])) * ranks / seq_length)


@lru_cache(maxsize=64)
def among_neighbours(shards: Shards, inner: int) -> Shards:
    """Convert a division of the sequence over groups of `inner` adjacent ranks to a division over individual ranks. The
    tokens of each group are divided equally among the ranks of the group."""
    if inner == 1:
        return shards
    held = tuple(part for spans in shards.held for part in equal_parts(spans, inner))
    return Shards(held, held)


def equal_parts(spans: Spans, parts: int) -> Iterator[Spans]:
    """Divide the ascending positions in `spans` into parts of equal size."""
    size = sum(map(len, spans)) // parts
    rows = list(chain.from_iterable(spans))
    for part in range(parts):
        yield as_spans(np.array(rows[part * size : (part + 1) * size]))


def mean_imbalances(told: Sequence[Imbalance]) -> Imbalance:
    """Return the mean of the imbalances `told`, one for each micro-batch. The imbalances of individual micro-batches
    are averaged, because ranks synchronize in each micro-batch."""
    return Imbalance(*(fmean(each) for each in zip(*told, strict=True)))
