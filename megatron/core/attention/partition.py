"""Which tokens of a sequence a context-parallel rank holds: integers only, no torch.

A causal query sees the keys before it, so equal lengths in plain order would give the last rank all the work. The
sequence is cut into 2 * size chunks instead, and rank r holds chunks r and 2 * size - 1 - r: an early one and the late
one that makes up for it ("zig-zag"). Every pair of ranks then has the same number of pairs of tokens to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import lcm

Spans = tuple[range, ...]
"""Places in the whole sequence of a rank's rows, which hold one range after the other."""


def rank_spans(seq_length: int, rank: int, size: int) -> Spans:
    """The places that rank `rank` of `size` holds, in ascending order."""
    if size == 1:
        return (range(seq_length),)
    assert seq_length % (2 * size) == 0, f"{seq_length} tokens do not divide into 2 * {size} chunks"
    chunk = seq_length // (2 * size)
    return tuple(range(c * chunk, (c + 1) * chunk) for c in (rank, 2 * size - 1 - rank))


def chunk_order(size: int) -> list[int]:
    """The chunks in the order of the ranks that hold them: 0, 7, 1, 6, 2, 5, 3, 4 for four ranks."""
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def sequence_divisor(context_parallel: int, tensor_parallel: int, sequence_parallel: bool) -> int:
    """What the sequence length must be a multiple of: each rank has two equal chunks, and under sequence parallelism
    its tokens divide over the tensor-parallel ranks."""
    chunks = 2 * context_parallel if context_parallel > 1 else 1
    shards = context_parallel * tensor_parallel if sequence_parallel else 1
    return lcm(chunks, shards)


Documents = tuple[tuple[int, ...], ...]
"""For each sample, the places at which its documents begin; the first is 0."""


def document_starts(document_ids: Sequence[Sequence[int]]) -> Documents:
    """From the document number of every token of every sample; a document's tokens lie side by side."""
    return tuple(
        (0, *(place for place, (before, here) in enumerate(pairwise(ids), 1) if before != here)) for ids in document_ids
    )
