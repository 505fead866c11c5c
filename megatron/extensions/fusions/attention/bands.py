"""Tiles of causal attention as bands: for each query the range of keys that it sees, and for each key the queries.

Rows are in ascending order of positions, and a query sees an interval of positions: from the beginning of its document
or window to its own. So its keys are adjacent rows, whatever the tiles: documents, windows, and the two chunks of a
rank under context parallelism. Both ends of the range never decrease from one query to the next. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.core.attention.tiles import Tile

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Band:
    """Ranges of rows that see each other, counted from the first row of `queries` and of `keys`. The samples are one
    where all are alike."""

    queries: range
    """Rows of queries that have a key, and those between them."""
    keys: range
    of_queries: tuple[Integers, Integers]
    """For each query [samples, n] its first key, and the one behind its last; equal where it sees none."""
    of_keys: tuple[Integers, Integers]
    """For each key [samples, m] its first query, and the one behind its last."""
    query_places: Integers
    """Positions [n] in the whole sequence."""
    key_places: Integers
    """Positions [m] in the whole sequence."""
    diagonal: bool
    """Whether each query attends to its own position."""

    @property
    def tile(self) -> Tile:
        """The rows of the band."""
        places = int(self.query_places[0]), int(self.key_places[0])
        return Tile(None, self.queries, self.keys, *places, diagonal=self.diagonal)


def band_of(tiles: Sequence[Tile]) -> Band:
    """The pairs of tiles that `causal_tiles` makes, as one band."""
    queries, keys = _covered([tile.queries for tile in tiles]), _covered([tile.keys for tile in tiles])
    samples = 1 + max(tile.sample or 0 for tile in tiles)
    first = np.full((samples, len(queries)), len(keys))
    stop, seen, own = (np.zeros((samples, len(queries)), np.int64) for _ in range(3))
    query_places, key_places = np.zeros(len(queries), np.int64), np.zeros(len(keys), np.int64)
    for tile in tiles:
        sample = 0 if tile.sample is None else tile.sample
        rows = slice(tile.queries.start - queries.start, tile.queries.stop - queries.start)
        begin, n, m = tile.keys.start - keys.start, np.arange(len(tile.queries)), len(tile.keys)
        low = begin + (0 * n if tile.window is None else np.maximum(0, n + tile.offset - tile.window + 1))
        high = begin + (np.minimum(m, n + tile.offset + 1) if tile.diagonal else 0 * n + m)
        first[sample, rows] = np.minimum(first[sample, rows], low)
        stop[sample, rows] = np.maximum(stop[sample, rows], high)
        seen[sample, rows] += high - low
        own[sample, rows] |= tile.diagonal
        query_places[rows] = tile.first_query + n
        key_places[begin : begin + m] = tile.first_key + np.arange(m)
    some = seen > 0
    assert (np.where(some, stop - first, 0) == seen).all(), "the keys of a query are not adjacent"
    stop = np.maximum.accumulate(stop, axis=1)
    first = np.where(some, first, stop)
    assert (np.diff(first) >= 0).all(), "the keys of a query begin before those of the query before it"
    key = np.arange(len(keys))
    first_query = np.stack([np.searchsorted(row, key, side="right") for row in stop])
    stop_query = np.stack([np.searchsorted(row, key, side="right") for row in first])
    of_keys = first_query, np.maximum(first_query, stop_query)
    return Band(queries, keys, (first, stop), of_keys, query_places, key_places, bool(own.all()))


def _covered(ranges: Sequence[range]) -> range:
    return range(min(rows.start for rows in ranges), max(rows.stop for rows in ranges))
