"""Tests of the partition of tokens and attention tiles among context-parallel ranks. Each pair of a query and a key
that the mask allows is computed exactly once."""

from __future__ import annotations

from random import Random

import pytest

from megatron.core.attention.tiles import (
    Documents,
    Spans,
    Tile,
    causal_tiles,
    chunk_order,
    halved,
    joined,
    rank_spans,
    short_spans,
)

Pair = tuple[int, int, int]


def places(spans: Spans) -> list[int]:
    return [place for span in spans for place in span]


def seen_pairs(tiles: tuple[Tile, ...], queries: Spans, keys: Spans, samples: int) -> list[Pair]:
    """Return one tuple (sample, query position, key position) for every pair of a query and a key that the tiles
    compute."""
    query_at, key_at = places(queries), places(keys)
    pairs = []
    for tile in tiles:
        for i, query in enumerate(tile.queries):
            for j, key in enumerate(tile.keys):
                distance = i + tile.offset - j
                if (tile.diagonal and distance < 0) or (tile.window is not None and distance >= tile.window):
                    continue
                assert query_at[query] == tile.first_query + i
                assert key_at[key] == tile.first_key + j
                found = range(samples) if tile.sample is None else [tile.sample]
                pairs += [(sample, query_at[query], key_at[key]) for sample in found]
    return pairs


def brute_force(queries: Spans, keys: Spans, documents: Documents, window: int | None) -> set[Pair]:
    return {
        (sample, q, k)
        for sample, starts in enumerate(documents)
        for q in places(queries)
        for k in places(keys)
        if k <= q and not any(k < start <= q for start in starts) and (window is None or q - k < window)
    }


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_token_has_one_rank_and_ranks_have_equal_work_in_every_step(size: int) -> None:
    spans = [rank_spans(16 * size, rank, size) for rank in range(size)]
    assert sorted(place for rank in spans for place in places(rank)) == list(range(16 * size))
    assert all(places(rank) == sorted(places(rank)) for rank in spans)
    assert [span.start // 8 for rank in spans for span in rank] == chunk_order(size)
    for step in range(size):
        work = []
        for rank in range(size):
            keys = spans[(rank - step) % size]
            work.append(len(seen_pairs(causal_tiles(spans[rank], keys, None, None), spans[rank], keys, 1)))
        assert len(set(work)) == 1


@pytest.mark.parametrize("seed", range(40))
def test_tiles_cover_the_visible_keys(seed: int) -> None:
    random = Random(seed)
    size, samples = random.choice([1, 2, 3, 4]), random.choice([1, 2, 3])
    length = 2 * size * random.randint(1, 7)
    window = random.choice([None, None, 1, 2, random.randint(1, length + 1)])
    documents = None
    if random.random() < 0.7:
        cuts = [sorted(random.sample(range(1, length), min(length - 1, random.randint(0, 5)))) for _ in range(samples)]
        documents = tuple((0, *cut) for cut in (cuts if random.random() < 0.8 else cuts[:1] * samples))
    spans = [rank_spans(length, rank, size) for rank in range(size)]
    for queries in spans:
        for keys in [*spans, (range(length),)]:
            tiles = causal_tiles(queries, keys, documents, window)
            pairs = seen_pairs(tiles, queries, keys, samples)
            assert len(pairs) == len(set(pairs))
            assert set(pairs) == brute_force(queries, keys, documents or ((0,),) * samples, window)
            for parts in (halved(tiles, 3, 8), halved(tiles, 3, 1)):
                assert sorted(seen_pairs(parts, queries, keys, samples)) == sorted(pairs)
                assert_on_diagonal_first(parts)
            assert all(len(tile.queries) <= 3 for tile in halved(tiles, 3, 8) if tile.diagonal)
            assert all(tile.queries and tile.keys for tile in tiles)
            if set(places(queries)) <= set(places(keys)):
                on_diagonal = [
                    (sample, row)
                    for tile in tiles
                    if tile.diagonal
                    for sample in (range(samples) if tile.sample is None else [tile.sample])
                    for row in tile.queries
                ]
                assert len(on_diagonal) == samples * len(places(queries)) == len(set(on_diagonal))
            assert [t.diagonal for t in tiles] == sorted((t.diagonal for t in tiles), reverse=True)


def assert_on_diagonal_first(tiles: tuple[Tile, ...]) -> None:
    """Assert that for each query, the diagonal tile is the first tile."""
    own = {(tile.sample, row) for tile in tiles if tile.diagonal for row in tile.queries}
    for tile in tiles:
        if tile.diagonal:
            own -= {(tile.sample, row) for row in tile.queries}
        else:
            assert not own & {(tile.sample, row) for row in tile.queries}


def test_neighbouring_full_tiles_are_joined() -> None:
    """A rank launches three kernels for its own keys, and a single kernel for the keys of each other rank."""
    spans = [rank_spans(32, rank, 4) for rank in range(4)]
    for rank, queries in enumerate(spans):
        for source, keys in enumerate(spans):
            tiles = causal_tiles(queries, keys, None, None)
            whole = joined(tiles)
            assert len(whole) == (3 if rank == source else 1)
            cells = [
                {(q, k) for tile in found for q in tile.queries for k in tile.keys if not tile.diagonal}
                for found in (tiles, whole)
            ]
            assert cells[0] == cells[1]


def test_far_documents_cost_nothing() -> None:
    """No tile pairs queries with keys of a different document, and no diagonal tile is larger than a document."""
    spans = [rank_spans(64, rank, 4) for rank in range(4)]
    documents = (tuple(range(0, 64, 8)),)
    for rank in range(4):
        for source in range(4):
            tiles = causal_tiles(spans[rank], spans[source], documents, None)
            assert [len(tile.queries) for tile in tiles] == ([8, 8] if rank == source else [])


def test_short_spans_cover_the_same_positions() -> None:
    assert short_spans((range(3, 8), range(20, 22)), 2) == (range(3, 5), range(5, 7), range(7, 8), range(20, 22))
    assert short_spans((range(4), range(4, 4)), 9) == (range(4),)
