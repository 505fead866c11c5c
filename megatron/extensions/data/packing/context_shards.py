"""Division of packed documents over context-parallel ranks, with equal numbers of query-key pairs per rank. This module
does not import torch.

By default, each rank receives one early and one late chunk of the sample. The attention work of the ranks is then equal
only if the sample is a single document. This module assigns different tokens to the ranks, but the same number of
tokens per rank, so that shapes and padding do not change. The module evaluates several divisions of the documents, and
uses the division with the lowest `Score`:

- the default division, in which each rank receives a pair of chunks of the sample;
- a division in which each rank receives a pair of chunks of every document (zig-zag per document). All ranks have equal
  work, but short documents are fragmented;
- divisions of the sample into chunks of equal size, which are assigned to ranks so that the work is balanced (number
  partitioning). One division is evaluated for each number of chunks in `CHUNKS`;
- divisions in which whole documents are assigned to ranks so that the work is balanced. A document is divided only if
  it is longer than a limit or fits on no rank. One division is evaluated for each limit in `WHOLE`.

The keys of a document are sent to other ranks only if the document is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.core.attention.tiles import Documents, Shards, Spans, rank_spans
from megatron.extensions.data.packing.dealing import equal_groups

TILE = 64 * 64
"""Fixed cost of a tile, which is the attention between one range of queries and one range of keys. The unit is the time
in which a kernel computes one query-key pair."""

EQUAL = 1.02
"""Tolerance for comparing divisions. All divisions whose estimated time is at most `EQUAL` times the lowest estimated
time count as equally fast. Of these divisions, the one that sends the fewest keys is used."""

CHUNKS = (1, 2, 4, 8)
"""Numbers of chunk pairs per rank that `dealt_chunks` tries when it divides a sample into chunks of equal size."""

WHOLE = (1.0, 0.5, 0.25, 0.125)
"""Length limits that are tried when whole documents are assigned to ranks, as fractions of the number of tokens per
rank. Documents up to the limit are assigned to one rank without being divided."""

Owners = NDArray[np.int64]
"""Rank that holds each position, [seq_length]."""


class Score(NamedTuple):
    """Estimated cost of one division of a sequence over context-parallel ranks."""

    time: float
    """Estimated time of the slowest rank, in units of one query-key pair. The time of a rank is its number of query-key
    pairs plus `TILE` times its number of tiles."""

    work: float
    """Ratio of the busiest rank's number of query-key pairs to the mean over ranks."""

    travelling: int
    """Number of keys that each rank sends to the other ranks. All ranks send the same number."""


def score(owners: Owners, documents: Documents, ranks: int) -> Score:
    """Compute the cost of the division `owners` for the samples of a micro-batch. `documents` contains the start
    positions of the documents in each sample."""
    works = np.bincount(owners, seen_keys(documents, len(owners)), ranks)
    changes = np.flatnonzero(np.diff(owners, prepend=-1))
    tiles = np.zeros(ranks)
    for starts in documents:
        begins = np.asarray(starts, np.int64)
        pieces = np.union1d(begins, changes)
        firsts = np.searchsorted(pieces, begins)[np.searchsorted(begins, pieces, "right") - 1]
        tiles += np.bincount(owners[pieces], np.arange(len(pieces)) - firsts + 1, ranks)
    sent = int(np.bincount(owners[_in_cut_documents(owners, documents)], minlength=ranks).max())
    return Score(float((works + TILE * tiles).max()), float(works.max() / works.mean()), sent)


def seen_keys(documents: Documents, seq_length: int) -> NDArray[np.int64]:
    """Return the number of keys that the query at each position attends to, summed over samples, [seq_length].
    `documents` contains the start positions of the documents in each sample."""
    places = np.arange(seq_length)
    counts = np.zeros(seq_length, np.int64)
    for starts in documents:
        begins = np.asarray(starts, np.int64)
        counts += places - begins[np.searchsorted(begins, places, "right") - 1] + 1
    return counts


@lru_cache(maxsize=64)
def balanced_shards(documents: Documents, seq_length: int, ranks: int) -> Shards:
    """Return the division with the lowest cost. All samples of a micro-batch are divided in the same way."""
    alike = tuple(dict.fromkeys(documents))
    found = [even_chunks(seq_length, ranks), *dealt_chunks(alike, seq_length, ranks)]
    if len(alike) == 1:
        lengths = np.diff([*alike[0], seq_length])
        found += [chunks_of_documents(lengths, ranks), *(whole_documents(lengths, ranks, share) for share in WHOLE)]
    return shards_of(_best(found, documents, ranks), documents, ranks)


@lru_cache(maxsize=64)
def hybrid_shards(documents: Documents, seq_length: int, ranks: int, longest: int | None) -> Shards:
    """Return the division with the lowest cost among the divisions that keep short documents on one rank. Even a short
    document is divided if no rank has enough room for it.

    Args:
        documents: Start positions of the documents, for exactly one sample.
        seq_length: Tokens per sample.
        ranks: Number of context-parallel ranks.
        longest: Length limit of documents that stay on one rank. None selects the limit with the lowest estimated cost.
    """
    assert len(documents) == 1, "a rule allows one sample per micro-batch"
    lengths = np.diff([*documents[0], seq_length])
    shares = WHOLE if longest is None else (longest * ranks / seq_length,)
    return shards_of(
        _best([whole_documents(lengths, ranks, share) for share in shares], documents, ranks), documents, ranks
    )


def _best(found: list[Owners], documents: Documents, ranks: int) -> Owners:
    """Return the fastest of the divisions in `found`. If several divisions are about equally fast, return the division
    that sends the fewest keys. Ties are broken in favor of earlier divisions."""
    scores = [score(owners, documents, ranks) for owners in found]
    least = min(each.time for each in scores)
    fair = [place for place, each in enumerate(scores) if each.time <= EQUAL * least]
    return found[min(fair, key=lambda place: scores[place].travelling)]


def even_chunks(seq_length: int, ranks: int) -> Owners:
    """Return the default division of a sequence over ranks, as `megatron.core.attention.tiles.rank_spans` defines
    it."""
    owners = np.empty(seq_length, np.int64)
    for rank in range(ranks):
        for span in rank_spans(seq_length, rank, ranks):
            owners[span.start : span.stop] = rank
    return owners


def dealt_chunks(documents: Documents, seq_length: int, ranks: int) -> Iterator[Owners]:
    """Divide the sample into chunks of equal size and assign the chunks to ranks so that the work is balanced. Yield
    one division for each number of chunk pairs in `CHUNKS`, in ascending order. The iterator ends at the first number
    of chunks that does not divide the sequence length."""
    seen = seen_keys(documents, seq_length)
    for pairs in CHUNKS:
        chunks = 2 * ranks * pairs
        if seq_length % chunks:
            return
        groups = equal_groups(seen.reshape(chunks, -1).sum(1), ranks)
        of_chunk = np.empty(chunks, np.int64)
        of_chunk[groups] = np.arange(ranks)[:, None]
        yield np.repeat(of_chunk, seq_length // chunks)


def chunks_of_documents(lengths: NDArray[np.int64], ranks: int) -> Owners:
    """Divide each document into 2 * ranks chunks, and assign one early and one late chunk to each rank.

    The lengths of a document's chunks differ by at most one token. The longer chunks are assigned to the ranks in
    round-robin order, which continues across documents, so that all ranks have the same number of tokens."""
    order = np.array([*range(ranks), *range(ranks - 1, -1, -1)])
    parts, turn = [], 0
    for length in lengths.tolist():
        least, more = divmod(length, 2 * ranks)
        sizes = np.full(2 * ranks, least)
        late = 0
        for extra in range(more):
            rank = (turn + extra) % ranks
            # A rank's first extra token extends its early chunk, and its second extra token extends its late chunk.
            late = extra // ranks
            sizes[2 * ranks - 1 - rank if late else rank] += 1
        turn = (turn + more) % ranks
        parts.append(np.repeat(order, sizes))
    return np.concatenate(parts)


def whole_documents(lengths: NDArray[np.int64], ranks: int, share: float) -> Owners:
    """Assign whole documents to ranks. Documents that are longer than `share` times the number of tokens per rank are
    divided into chunks, which are assigned separately.

    Documents and chunks are assigned in descending order of query-key pairs per token. Only ranks with enough room for
    the document or chunk are considered. Among these ranks, the one that needs the most additional work per free token
    to reach the mean work is selected. Finally, chunks of the busiest rank are exchanged for chunks with less work."""
    length = int(lengths.sum())
    deal = _Deal(lengths, ranks, max(1, length // (32 * ranks)), share * length / ranks)
    deal.run()
    deal.exchange()
    return deal.owners


class _Deal:
    """Assignment of whole documents and of document chunks to ranks."""

    def __init__(self, lengths: NDArray[np.int64], ranks: int, chunk: int, longest: float) -> None:
        length = int(lengths.sum())
        self.chunk = chunk
        self.owners = np.full(length, -1)
        starts = np.cumsum(lengths) - lengths
        self.before = np.concatenate([[0], np.cumsum(np.arange(length) - np.repeat(starts, lengths) + 1)])
        """Total number of query-key pairs of all queries before each position, [length + 1]."""

        self.room = np.full(ranks, length // ranks)
        """Number of tokens that can still be assigned to each rank."""

        self.missing = np.full(ranks, self.before[-1] / ranks)
        """Number of query-key pairs that each rank lacks to reach the mean over ranks, [ranks]. The number is negative
        for ranks with more pairs than the mean."""

        self.pieces: list[tuple[int, int]] = []
        for start, size in zip(starts.tolist(), lengths.tolist(), strict=True):
            step = size if size <= longest else chunk
            self.pieces += [(place, min(start + size, place + step)) for place in range(start, start + size, step)]

    def work(self, start: int, stop: int) -> int:
        return int(self.before[stop] - self.before[start])

    def run(self) -> None:
        """Assign every short document and every chunk of a long document to a rank. A document or chunk for which no
        rank has enough room is divided between ranks."""
        waiting = sorted(self.pieces, key=lambda piece: self.work(*piece) / (piece[1] - piece[0]))
        self.pieces = []
        while waiting:
            start, stop = waiting.pop()
            wanted = np.where(self.room > 0, self.missing / np.maximum(self.room, 1), -np.inf)
            fits = np.where(self.room >= stop - start, wanted, -np.inf)
            rank = int(fits.argmax())
            if self.room[rank] < stop - start:
                rank = int(wanted.argmax())
                cut = start + int(self.room[rank])
                waiting.append((cut, stop))
                stop = cut
            self.owners[start:stop] = rank
            self.room[rank] -= stop - start
            self.missing[rank] -= self.work(start, stop)
            self.pieces.append((start, stop))

    def exchange(self) -> None:
        """Exchange chunks of equal size between the busiest and the least busy rank while this reduces the
        imbalance."""
        chunks = np.array([start for start, stop in self.pieces if stop - start == self.chunk], np.int64)
        works = self.before[chunks + self.chunk] - self.before[chunks] if len(chunks) else chunks
        for _ in range(4 * len(self.room)):
            busy, idle = int(self.missing.argmin()), int(self.missing.argmax())
            gap = self.missing[idle] - self.missing[busy]
            mine, others = (np.flatnonzero(self.owners[chunks] == rank) for rank in (busy, idle))
            if not len(mine) or not len(others):
                return
            moved = works[mine][:, None] - works[others]
            # For each pair of chunks that could be exchanged, `left` is the maximum of the two ranks' work after the
            # exchange, minus the current work of the least busy rank.
            left = np.maximum(moved, gap - moved)
            give, take = np.unravel_index(int(left.argmin()), left.shape)
            if left[give, take] >= gap:
                return
            for chunk, rank in ((mine[give], idle), (others[take], busy)):
                self.owners[chunks[chunk] : chunks[chunk] + self.chunk] = rank
            self.missing[busy] += moved[give, take]
            self.missing[idle] -= moved[give, take]


def _in_cut_documents(owners: Owners, documents: Documents) -> NDArray[np.bool_]:
    """Return a mask of positions, [seq_length]. The mask is True at positions that belong, in at least one sample, to a
    document that is divided between ranks."""
    found = np.zeros(len(owners), bool)
    for starts in documents:
        begins = np.asarray(starts, np.int64)
        cut = np.minimum.reduceat(owners, begins) != np.maximum.reduceat(owners, begins)
        found |= np.repeat(cut, np.diff([*starts, len(owners)]))
    return found


def shards_of(owners: Owners, documents: Documents, ranks: int) -> Shards:
    """Convert `owners`, which contains the rank of each position, to `Shards`. The result also lists the positions
    whose keys each rank sends. All ranks send the same number of keys, so a rank may also have to send some keys of
    documents that are not divided."""
    held = [np.flatnonzero(owners == rank) for rank in range(ranks)]
    shared = _in_cut_documents(owners, documents)
    most = max(int(shared[places].sum()) for places in held)
    spans = tuple(as_spans(places) for places in held)
    # If most keys must be sent, sending all of them costs little more and avoids copying the selected keys to a buffer.
    if 4 * most > 3 * len(held[0]):
        return Shards(spans, spans)
    sent = []
    for places in held:
        order = np.argsort(~shared[places], kind="stable")[:most]
        sent.append(as_spans(np.sort(places[order])))
    return Shards(spans, tuple(sent))


def owners_of(shards: Shards, seq_length: int) -> Owners:
    """Return, for each position, the rank whose entry in `shards` contains the position, [seq_length]."""
    owners = np.empty(seq_length, np.int64)
    for rank, spans in enumerate(shards.held):
        for span in spans:
            owners[span.start : span.stop] = rank
    return owners


def as_spans(places: NDArray[np.int64]) -> Spans:
    """Convert ascending positions to ranges of consecutive positions."""
    if not len(places):
        return ()
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    bounds = [0, *breaks.tolist(), len(places)]
    return tuple(range(int(places[a]), int(places[b - 1]) + 1) for a, b in pairwise(bounds))
