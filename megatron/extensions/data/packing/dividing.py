"""Divides training samples over context-parallel ranks by their documents, and counts how equal their work is."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from megatron.core.attention.tiles import Documents, Shards
from megatron.extensions.data.packing.context_shards import (
    Score,
    balanced_shards,
    even_chunks,
    hybrid_shards,
    owners_of,
    score,
)


class Divider:
    """Divides micro-batches (`megatron.core.attention.tiles.DividesSequences`). `hybrid`: documents of at most
    `longest` tokens (None: the cost decides) stay on one rank each."""

    def __init__(self, hybrid: bool = False, longest: int | None = None) -> None:
        self.hybrid, self.longest = hybrid, longest
        self.scores: list[tuple[Score, Score]] = []
        """Of each micro-batch divided since the last report: the usual division, and this one."""

    def __call__(self, documents: Documents, seq_length: int, ranks: int) -> Shards:
        found = self.divided(documents, seq_length, ranks)
        self.scores.append(scores_of(found, documents, seq_length))
        return found

    def divided(self, documents: Documents, seq_length: int, ranks: int) -> Shards:
        if self.hybrid:
            return hybrid_shards(documents, seq_length, ranks, self.longest)
        return balanced_shards(documents, seq_length, ranks)


@lru_cache(maxsize=64)
def scores_of(shards: Shards, documents: Documents, seq_length: int) -> tuple[Score, Score]:
    """The cost of the usual division, and that of `shards`."""
    ranks = len(shards.held)
    usual, owners = even_chunks(seq_length, ranks), owners_of(shards, seq_length)
    return score(usual, documents, ranks), score(owners, documents, ranks)


def mean_imbalances(scores: Iterable[tuple[Score, Score]]) -> tuple[float, float]:
    """Pairs of the busiest rank as a multiple of the mean, by the usual division and by another one: sums over
    micro-batches, since ranks meet in each."""
    pairs = [(usual.work, other.work) for usual, other in scores]
    before, after = (sum(each) / max(len(pairs), 1) for each in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return before, after
