"""Division of training samples over context-parallel ranks by their documents, with statistics about the balance of
work."""

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
    """Work of the busiest rank of a micro-batch, divided by the mean."""

    before: float
    """The same with the usual division."""

    after: float
    sent: float
    """Fraction of its keys that each rank sends to the others."""


class Divider:
    """Divide micro-batches (`megatron.core.attention.tiles.DividesSequences`). `hybrid`: documents of at most `longest`
    tokens (None: chosen by cost) stay on one rank each. `inner` adjacent ranks share heads, so that only the work of
    such groups has to be equal."""

    def __init__(self, hybrid: bool = False, longest: int | None = None, inner: int = 1) -> None:
        self.hybrid, self.longest = hybrid, longest
        self.inner = inner
        self.told: list[Imbalance] = []
        """Imbalance of each micro-batch divided since the last report."""

    def __call__(self, documents: Documents, seq_length: int, ranks: int) -> Shards:
        found = self.divided(documents, seq_length, ranks // self.inner)
        self.told.append(imbalance_of(found, documents, seq_length))
        return among_neighbours(found, self.inner)

    def divided(self, documents: Documents, seq_length: int, groups: int) -> Shards:
        """The division over groups of ranks."""
        if self.hybrid:
            return hybrid_shards(documents, seq_length, groups, self.longest)
        return balanced_shards(documents, seq_length, groups)


@lru_cache(maxsize=64)
def imbalance_of(shards: Shards, documents: Documents, seq_length: int) -> Imbalance:
    """Imbalance of the work."""
    ranks = len(shards.held)
    usual, owners = even_chunks(seq_length, ranks), owners_of(shards, seq_length)
    before, after = (score(each, documents, ranks).work for each in (usual, owners))
    return Imbalance(before, after, sum(map(len, shards.sent[0])) * ranks / seq_length)


@lru_cache(maxsize=64)
def among_neighbours(shards: Shards, inner: int) -> Shards:
    """Convert a division over groups of `inner` ranks to one over ranks: equal parts of the tokens of each group."""
    if inner == 1:
        return shards
    held = tuple(part for spans in shards.held for part in equal_parts(spans, inner))
    return Shards(held, held)


def equal_parts(spans: Spans, parts: int) -> Iterator[Spans]:
    """Divide ascending positions into parts of equal size."""
    size = sum(map(len, spans)) // parts
    rows = list(chain.from_iterable(spans))
    for part in range(parts):
        yield as_spans(np.array(rows[part * size : (part + 1) * size]))


def mean_imbalances(told: Sequence[Imbalance]) -> Imbalance:
    """Mean over micro-batches, because ranks synchronize in each of them."""
    return Imbalance(*(fmean(each) for each in zip(*told, strict=True)))
