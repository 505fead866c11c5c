"""Shard sequences over context-parallel ranks in zig-zag order. Integers only, no torch.

Under a causal mask late queries see more keys, so contiguous shards would leave most of the work to the last rank.
Instead the sequence is split into 2 * size chunks, and rank r holds chunks r and 2 * size - 1 - r, an early and a late
one. Every rank then has the same number of query-key pairs to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import lcm

Spans = tuple[range, ...]
"""Positions in the whole sequence of a rank's rows, range after range."""


def rank_spans(seq_length: int, rank: int, size: int) -> Spans:
    """The positions that rank `rank` of `size` holds, in ascending order."""
    if size == 1:
        return (range(seq_length),)
    assert seq_length % (2 * size) == 0, f"{seq_length} tokens do not divide into 2 * {size} chunks"
    chunk = seq_length // (2 * size)
    return tuple(range(c * chunk, (c + 1) * chunk) for c in (rank, 2 * size - 1 - rank))


def short_spans(spans: Spans, longest: int) -> Spans:
    """The same positions in ranges of at most `longest`."""
    return tuple(span[start : start + longest] for span in spans for start in range(0, len(span), longest))


def chunk_order(size: int) -> list[int]:
    """Chunks in rank order: 0, 7, 1, 6, 2, 5, 3, 4 for four ranks."""
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def sequence_divisor(context_parallel: int, tensor_parallel: int, sequence_parallel: bool) -> int:
    """The number that the sequence length must be a multiple of: each rank holds two equal chunks, which sequence
    parallelism shards over the tensor-parallel ranks."""
    chunks = 2 * context_parallel if context_parallel > 1 else 1
    shards = context_parallel * tensor_parallel if sequence_parallel else 1
    return lcm(chunks, shards)


Documents = tuple[tuple[int, ...], ...]
"""For each sample, the positions at which its documents begin; the first is 0."""


def document_starts(document_ids: Sequence[Sequence[int]]) -> Documents:
    """Document starts from document ids [b][s]; the tokens of a document are adjacent."""
    return tuple(
        (0, *(place for place, (before, here) in enumerate(pairwise(ids), 1) if before != here)) for ids in document_ids
    )


@lru_cache(maxsize=64)
def cut_documents(documents: Documents | None, samples: int, length: int, longest: int) -> Documents:
    """Each document of samples of `length` tokens in documents of at most `longest`."""
    return tuple(
        tuple(place for start, stop in pairwise((*starts, length)) for place in range(start, stop, longest))
        for starts in documents or ((0,),) * samples
    )
