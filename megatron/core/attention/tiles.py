"""Sharding of sequences over context-parallel ranks, and causal attention as a list of tiles: rectangles of queries and
keys. This module does not import torch.

Under a causal mask, later queries see more keys, so contiguous shards would give later ranks more work. Instead, the
sequence is split into 2 * size chunks in zig-zag order: rank r holds an early chunk, r, and a late chunk,
2 * size - 1 - r. Every rank then computes the same number of query-key pairs.

A query sees a key if both are in the same document and window, and if the key is not after the query. A rank's queries,
the keys that it receives, and the documents each consist of ranges of consecutive positions. The visible query-key
pairs therefore form rectangles, most of which need no mask. No [s, s] mask is built, and masked pairs are not computed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import NamedTuple, Protocol

Spans = tuple[range, ...]
"""Ranges of token positions in the whole sequence. The ranges list the tokens that a rank holds, in the order of the
rank's rows."""


def rank_spans(seq_length: int, rank: int, size: int) -> Spans:
    """Return the positions that rank `rank` of `size` ranks holds, in ascending order."""
    if size == 1:
        return (range(seq_length),)
    assert seq_length % (2 * size) == 0, f"{seq_length} tokens cannot be divided into 2 * {size} chunks"
    chunk = seq_length // (2 * size)
    return tuple(range(c * chunk, (c + 1) * chunk) for c in (rank, 2 * size - 1 - rank))


class Shards(NamedTuple):
    """Positions of the tokens that each context-parallel rank holds, and of the keys that it sends to other ranks."""

    held: tuple[Spans, ...]
    """Position spans of each rank's tokens, in ascending order. Each rank has the same number of tokens."""

    sent: tuple[Spans, ...]
    """Position spans of the keys that each rank sends, because queries on other ranks can see them. Each rank sends the
    same number of keys."""


@lru_cache(maxsize=64)
def even_shards(seq_length: int, size: int) -> Shards:
    """Return the default sharding into chunks in zig-zag order."""
    spans = tuple(rank_spans(seq_length, rank, size) for rank in range(size))
    return Shards(spans, spans)


def merged(spans: Spans) -> Spans:
    """Merge adjacent spans of an ascending list."""
    found: list[range] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = range(found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)


@lru_cache(maxsize=64)
def rows_of(spans: Spans, some: Spans) -> Spans:
    """Convert the token positions `some` to row indices on a rank that holds the tokens at the positions `spans`."""
    return tuple(
        _rows(common, shift) for part in some for shift, span in _with_rows(spans) if (common := _common(part, span))
    )


def short_spans(spans: Spans, longest: int) -> Spans:
    """Split ranges of positions into ranges of at most `longest` positions."""
    return tuple(span[start : start + longest] for span in spans for start in range(0, len(span), longest))


def chunk_order(size: int) -> list[int]:
    """Return the numbers of the zig-zag chunks in the order of the ranks that hold them: 0, 7, 1, 6, 2, 5, 3, 4 for
    four ranks."""
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def sequence_divisor(context_parallel: int, tensor_parallel: int, sequence_parallel: bool) -> int:
    """Return the number by which the sequence length must be divisible.

    With context parallelism, each rank holds two chunks of equal length. Sequence parallelism shards the tokens of a
    rank over the tensor-parallel ranks.
    """
    chunks = 2 * context_parallel if context_parallel > 1 else 1
    shards = context_parallel * tensor_parallel if sequence_parallel else 1
    return lcm(chunks, shards)


Documents = tuple[tuple[int, ...], ...]
"""Start positions of the documents in each sample. The first document of a sample starts at 0."""


class DividesSequences(Protocol):
    """Function that divides the tokens of a micro-batch among context-parallel ranks. The function must have no side
    effects, and must return the same result on every rank."""

    def __call__(self, documents: Documents, seq_length: int, ranks: int) -> Shards: ...


def document_starts(document_ids: Sequence[Sequence[int]]) -> Documents:
    """Return the start positions of the documents, given the document id of each token, [b][s]. The tokens of a
    document must be adjacent."""
    return tuple(
        (0, *(place for place, (before, here) in enumerate(pairwise(ids), 1) if before != here)) for ids in document_ids
    )


@lru_cache(maxsize=64)
def cut_documents(documents: Documents | None, samples: int, length: int, longest: int) -> Documents:
    """Split documents so that each has at most `longest` tokens.

    `documents` contains the start positions of the documents in each of `samples` samples of `length` tokens. If
    `documents` is None, each sample is one document.
    """
    return tuple(
        tuple(place for start, stop in pairwise((*starts, length)) for place in range(start, stop, longest))
        for starts in documents or ((0,),) * samples
    )


@dataclass(frozen=True)
class Tile:
    """Rectangle of query-key pairs for which attention is computed: consecutive rows of queries, and consecutive rows
    of keys."""

    sample: int | None
    """Index of the sample to which the tile belongs; None if the tile applies to all samples."""

    queries: range
    """Rows of this rank's queries that belong to the tile."""

    keys: range
    """Rows of the keys that belong to the tile, among the keys that the rank currently has."""

    first_query: int
    """Position of the first query; the positions of the queries are consecutive."""

    first_key: int
    """Position of the first key; the positions of the keys are consecutive."""

    diagonal: bool
    """True if the queries and keys of the tile are the same tokens, so that the tile needs a causal mask. In a tile
    that is not diagonal, all keys precede all queries."""

    window: int | None = None
    """Number of keys visible to a query, including the key at its position; None if the window masks no key of the
    tile."""

    @property
    def offset(self) -> int:
        """Position of the first query minus position of the first key."""
        return self.first_query - self.first_key


@lru_cache(maxsize=256)
def causal_tiles(queries: Spans, keys: Spans, documents: Documents | None, window: int | None) -> tuple[Tile, ...]:
    """Return the tiles that pair queries at the positions `queries` with keys at the positions `keys`. Diagonal tiles
    come first.

    A diagonal tile contains queries and keys at the same positions. A query is in exactly one diagonal tile if `keys`
    contains the query's position.
    """
    found = list(_unwindowed_tiles(queries, keys, documents))
    if window is not None:
        found = [part for tile in found for part in _windowed(tile, window)]
    return tuple(sorted(found, key=lambda tile: not tile.diagonal))


def _unwindowed_tiles(queries: Spans, keys: Spans, documents: Documents | None) -> Iterator[Tile]:
    """Yield the tiles of each sample, ignoring the sliding window. A tile contains queries of one span and keys of one
    span, all from the same document."""
    for sample, starts in _samples(documents):
        of_keys = [(row, span, _documents_in(span, starts)) for row, span in _with_rows(keys)]
        for q_row, q_span in _with_rows(queries):
            of_queries = _documents_in(q_span, starts)
            for k_row, k_span, numbers in of_keys:
                end = max(q_span.stop, k_span.stop)
                for number in _common(of_queries, numbers):
                    document = range(starts[number], starts[number + 1] if number + 1 < len(starts) else end)
                    places = _common(q_span, document), _common(k_span, document)
                    yield from _document_tiles(sample, q_row, places[0], k_row, places[1])


def _documents_in(span: range, starts: tuple[int, ...]) -> range:
    """Return the numbers of all documents that have tokens in the span. `starts` contains the start positions of the
    documents."""
    return range(bisect_right(starts, span.start) - 1, bisect_left(starts, span.stop))


@lru_cache(maxsize=256)
def joined(tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """Merge adjacent tiles without a mask, so that fewer kernels run. The fields `first_query` and `first_key` of a
    merged tile are meaningless."""
    whole: list[Tile] = []
    for tile in tiles:
        last = whole[-1] if whole else None
        if last is None or tile.sample != last.sample or any(t.diagonal or t.window for t in (last, tile)):
            whole.append(tile)
        elif last.queries == tile.queries and last.keys.stop == tile.keys.start:
            whole[-1] = replace(last, keys=range(last.keys.start, tile.keys.stop))
        elif last.keys == tile.keys and last.queries.stop == tile.queries.start:
            whole[-1] = replace(last, queries=range(last.queries.start, tile.queries.stop))
        else:
            whole.append(tile)
    return tuple(whole)


@lru_cache(maxsize=256)
def halved(tiles: tuple[Tile, ...], longest: int, times: int = 4) -> tuple[Tile, ...]:
    """Halve diagonal tiles, at most `times` times, until they have at most `longest` queries.

    The halves of a diagonal tile contain fewer masked pairs than the whole tile. Smaller diagonal tiles save time in
    kernels that also compute masked pairs. The tiles stay in order, so that the diagonal tile of a query still precedes
    the query's other tiles.
    """
    return tuple(part for tile in tiles for part in _halves(tile, longest, times))


def _halves(tile: Tile, longest: int, times: int) -> Iterator[Tile]:
    if not tile.diagonal or len(tile.queries) <= longest or not times:
        yield tile
        return
    half, window = len(tile.queries) // 2, tile.window
    bare = replace(tile, window=None)
    first = replace(bare, queries=tile.queries[:half], keys=tile.keys[:half])
    last = replace(bare, queries=tile.queries[half:], first_query=tile.first_query + half)
    between = replace(last, keys=tile.keys[:half], diagonal=False)
    last = replace(last, keys=tile.keys[half:], first_key=tile.first_key + half)
    for part in (first, last):
        for windowed in (part,) if window is None else _windowed(part, window):
            yield from _halves(windowed, longest, times - 1)
    yield from (between,) if window is None else _windowed(between, window)


def _samples(documents: Documents | None) -> list[tuple[int | None, tuple[int, ...]]]:
    if documents is None:
        return [(None, (0,))]
    if len(set(documents)) == 1:
        return [(None, documents[0])]
    return list(enumerate(documents))


def _with_rows(spans: Spans) -> Iterator[tuple[int, range]]:
    """Return a pair (shift, span) for each span: the token at position p is in row p + shift."""
    row = 0
    for span in spans:
        yield row - span.start, span
        row += len(span)


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _rows(places: range, shift: int) -> range:
    return range(places.start + shift, places.stop + shift)


def _document_tiles(sample: int | None, q_shift: int, queries: range, k_shift: int, keys: range) -> Iterator[Tile]:
    """Yield the tiles for one document. `queries` and `keys` are the positions of the queries and keys in the document.
    Row numbers are positions plus `q_shift` for queries, and plus `k_shift` for keys."""
    if not queries:
        return
    before, same = range(keys.start, min(keys.stop, queries.start)), _common(keys, queries)
    if same:
        assert same == queries, f"keys at {keys} include only some of the queries at {queries}"
        yield Tile(sample, _rows(same, q_shift), _rows(same, k_shift), same.start, same.start, diagonal=True)
    if before:
        yield Tile(sample, _rows(queries, q_shift), _rows(before, k_shift), queries.start, before.start, diagonal=False)


def _windowed(tile: Tile, window: int) -> Iterator[Tile]:
    """Yield the parts of a tile that are inside the sliding window: first a part without masked pairs, then a part in
    which the window masks some pairs."""
    if tile.diagonal:
        yield replace(tile, window=window) if len(tile.queries) > window else tile
        return
    # Query i sees key j of the tile if offset + i - j < window.
    tile = _without_keys(tile, tile.offset - window + 1)
    if not tile.keys:
        return
    seeing_all = window - tile.offset
    yield replace(tile, queries=tile.queries[:seeing_all])
    rest = replace(tile, queries=tile.queries[seeing_all:], first_query=tile.first_query + seeing_all)
    rest = _without_keys(rest, 1)
    rest = replace(rest, queries=rest.queries[: len(rest.keys)])
    if rest.queries:
        yield replace(rest, window=window) if len(rest.queries) > 1 else rest


def _without_keys(tile: Tile, count: int) -> Tile:
    count = max(0, count)
    return replace(tile, keys=tile.keys[count:], first_key=tile.first_key + count)
