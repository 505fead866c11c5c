"""Attention with dropout in one fused GPU kernel. The kernel applies the dropout masks of `megatron.core.dropout`. This
module contains the tile kernel, its operators, and a function that computes attention for all queries of a rank.

The equivalent in plain torch is `TorchKernel` (`megatron.core.attention.tile_kernels`), which uses the same dropout
masks but sums in a different order.

The forward pass works as in FlashAttention-2 (arXiv 2307.08691). The backward pass consists of one kernel for queries,
and one for keys and values. Neither kernel uses atomic additions, so the results are bit-equal in every run. The
kernels that compute the scores also compute the dropout mask, as a hash of positions. The mask is never stored.

The kernel merges its tiles, which are rectangles of query-key pairs, into a `Band`. A band contains two kinds of
ranges: the keys to which each query attends, and the queries that attend to each key. Rows are sorted by position. A
query attends to an interval of positions, from the beginning of its document or window to the query's position. The
keys of a query are therefore adjacent rows in documents, in windows, and in the two chunks of a rank under context
parallelism. Neither the start nor the end of the key range decreases from one query to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.core.attention.tile_kernels import Dropout, Gradients, Outputs, Rows, query_rows
from megatron.core.attention.tiles import Tile
from megatron.core.attention.varlen import PackedAttention
from megatron.core.dropout import bits_of_columns
from megatron.core.host_to_device import integers_on
from megatron.extensions.speed.fusions.kernel_choice import gpu_operator

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Band:
    """Attention mask, stored as the range of keys to which each query attends, and as the range of queries that attend
    to each key. Key positions are relative to `keys.start`, and query positions to `queries.start`. If all samples have
    the same ranges, the arrays have a single entry for all samples."""

    queries: range
    """Smallest range of rows that contains all queries with at least one key."""
    keys: range
    of_queries: tuple[Integers, Integers]
    """Start and end of each query's key range, each [samples, n]. If a query attends to no keys, its start equals its
    end."""
    of_keys: tuple[Integers, Integers]
    """Start and end of each key's query range, each [samples, m]."""
    query_places: Integers
    """Positions [n] of the queries in the whole sequence."""
    key_places: Integers
    """Positions [m] of the keys in the whole sequence."""
    diagonal: bool
    """True if each query attends to the key at the same position."""

    @property
    def tile(self) -> Tile:
        """Return a single tile that contains all queries and keys of the band."""
        places = int(self.query_places[0]), int(self.key_places[0])
        return Tile(None, self.queries, self.keys, *places, diagonal=self.diagonal)


@lru_cache(maxsize=64)
def band_of(tiles: tuple[Tile, ...]) -> Band:
    """Merge tiles from `causal_tiles` into one band that contains the query-key pairs of all tiles."""
    queries, keys = _covered([tile.queries for tile in tiles]), _covered([tile.keys for tile in tiles])
    samples = 1 + max(tile.sample or 0 for tile in tiles)
    first = np.full((samples, len(queries)), len(keys))
    stop, seen, own = (np.zeros((samples, len(queries)), np.int64) for _ in range(3))
    query_places, key_places = np.zeros(len(queries), np.int64), np.zeros(len(keys), np.int64)
    for tile in tiles:
        sample = 0 if tile.sample is None else tile.sample
        rows = slice(tile.queries.start - queries.start, tile.queries.stop - queries.start)
        begin = tile.keys.start - keys.start
        n = np.arange(len(tile.queries))
        m = len(tile.keys)
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
    assert (np.diff(first) >= 0).all(), "the keys of a query begin before the keys of the previous query"
    key = np.arange(len(keys))
    first_query = np.stack([np.searchsorted(row, key, side="right") for row in stop])
    stop_query = np.stack([np.searchsorted(row, key, side="right") for row in first])
    of_keys = first_query, np.maximum(first_query, stop_query)
    return Band(queries, keys, (first, stop), of_keys, query_places, key_places, bool(own.all()))


def _covered(ranges: Sequence[range]) -> range:
    return range(min(rows.start for rows in ranges), max(rows.stop for rows in ranges))


WIDEST = 256
"""Largest head width that the kernel supports."""


def fits(dtype: torch.dtype, head_dim: int, value_head_dim: int) -> bool:
    """Return True if the kernel supports the given head widths and dtype."""
    widths = head_dim, value_head_dim
    return dtype in (torch.float16, torch.bfloat16) and max(widths) <= WIDEST and not any(d % 8 for d in widths)


class FlashDropoutKernel:
    """Tile kernel that computes attention with dropout for all tiles in a single launch. The kernel raises RuntimeError
    if it does not support the GPU, the precision or the head widths."""

    needs_places = True
    most_queries = None
    packed = None

    def __init__(self, scale: float, dropout: Dropout) -> None:
        self.scale, self.dropout = scale, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        if tiles:
            tile = band_of(tuple(tiles)).tile
            yield tile, self.attend(query_rows(q, tile), _keys(k, tile), _keys(v, tile), tuple(tiles))

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        if tiles:
            tile = band_of(tuple(tiles)).tile
            part = Rows(*(query_rows(x, tile) for x in (rows.grad, rows.out, rows.lse)))
            yield tile, self.gradients(part, query_rows(q, tile), _keys(k, tile), _keys(v, tile), tuple(tiles))

    def at_once(self, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], sinks: Tensor | None) -> Tensor:
        """Compute attention for all queries of a rank in one launch, with gradients. The output is [n, b, heads, dv].

        Args:
            q: Queries [n, b, heads, d].
            k: Keys [m, b, groups, d].
            v: Values [m, b, groups, dv].
            tiles: Tiles that contain all queries.
            sinks: Attention sinks [heads].
        """
        return PackedAttention.apply(q, k, v, sinks, _AtOnce(self), tiles)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Outputs:
        """Return the attention outputs for all query rows in the tiles.

        Args:
            q: Queries [n, b, heads, d].
            k: Keys [m, b, groups, d].
            v: Values [m, b, groups, dv].
            tiles: Tiles to compute.
        """
        return _forward(_dense(q), _dense(k), _dense(v), *self._band(tiles, q.device))

    def gradients(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Gradients:
        """Return the gradients of the query, key and value rows that the tiles contain. `rows` holds the output
        gradients, outputs and log-sum-exps of the query rows. The other arguments are the same as for `attend`."""
        band = self._band(tiles, q.device)
        return _backward(_dense(rows.grad), _dense(rows.out), rows.lse, _dense(q), _dense(k), _dense(v), *band)

    def _band(self, tiles: tuple[Tile, ...], device: torch.device) -> BandParts:
        d = self.dropout
        return *_on_device(tiles, device), self.scale, d.p, d.key, d.head_offset, d.sample_index


class _AtOnce:
    """Adapter through which `PackedAttention` calls the dropout kernel. A single launch computes attention for all
    queries of a rank."""

    def __init__(self, kernel: FlashDropoutKernel) -> None:
        self.kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Outputs:
        ((_, (out, lse)),) = self.kernel.forward(q, k, v, tiles)
        return out, lse.movedim(-1, 0)

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], tiles: tuple[Tile, ...]
    ) -> Gradients:
        q, k, v = qkv
        rows = Rows(grad, kept[0], kept[1].movedim(0, -1))
        ((tile, (dq, dk, dv)),) = self.kernel.backward(rows, q, k, v, tiles)
        return dq, _whole(dk, k, tile), _whole(dv, v, tile)


def _whole(part: Tensor, x: Tensor, tile: Tile) -> Tensor:
    """Return the gradient of x. The gradient contains `part` in the rows of the tile's keys, and zeros in all other
    rows."""
    if len(part) == len(x):
        return part
    whole = torch.zeros(x.shape, dtype=part.dtype, device=part.device)
    whole[tile.keys.start : tile.keys.stop] = part
    return whole


def _keys(x: Tensor, tile: Tile) -> Tensor:
    return x[tile.keys.start : tile.keys.stop]


def _dense(x: Tensor) -> Tensor:
    """Return `x` if its channels are adjacent in memory. Otherwise, return a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _BandOnDevice(NamedTuple):
    """Copy of a `Band` on the device, with an int32 tensor for each array."""

    of_queries: Tensor
    """Start and end of each query's key range, [2, samples, n]."""
    of_keys: Tensor
    """Start and end of each key's query range, [2, samples, m]."""
    places: Tensor
    """Positions of the queries, [n]."""
    column_bits: Tensor
    """Dropout hash of each key position, [m]."""


@lru_cache(maxsize=64)
def _on_device(tiles: tuple[Tile, ...], device: torch.device) -> _BandOnDevice:
    """Copy the band that describes the tiles to the device. All layers and passes of a micro-batch share one copy of
    the band."""
    band = band_of(tiles)
    bits = bits_of_columns(torch.from_numpy(band.key_places)).numpy()
    arrays = np.stack(band.of_queries), np.stack(band.of_keys), band.query_places, bits
    flat = integers_on(device, np.concatenate([array.ravel() for array in arrays]), torch.int32)
    parts = flat.split([array.size for array in arrays])
    return _BandOnDevice(*(part.view(array.shape) for part, array in zip(parts, arrays, strict=True)))


_BAND = (
    "Tensor of_queries, Tensor of_keys, Tensor places, Tensor column_bits, "
    "float scale, float p, int key, int head_offset, Tensor sample_index"
)
"""Schema of the arguments that the forward and backward operators share: the fields of `_BandOnDevice`, and the kernel
settings."""

BandParts = tuple[Tensor, Tensor, Tensor, Tensor, float, float, int, int, Tensor]
"""Python types of the operator arguments that the schema `_BAND` declares."""


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *band: *BandParts) -> tuple[Tensor, Tensor]:
    n, b, heads, _ = q.shape
    return q.new_empty(n, b, heads, v.shape[-1]), q.new_empty(b, heads, n, dtype=torch.float32).permute(2, 0, 1)


def _fake_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *band: *BandParts
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_forward = gpu_operator(
    "attention.flash_dropout_triton:flash_dropout",
    f"(Tensor q, Tensor k, Tensor v, {_BAND}) -> (Tensor, Tensor)",
    _fake_forward,
)
"""Operator that returns the output [n, b, heads, dv] and the log-sum-exp [n, b, heads] in fp32."""

_backward = gpu_operator(
    "attention.flash_dropout_triton:flash_dropout_backward",
    f"(Tensor grad, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {_BAND}) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
"""Operator that returns the gradients of q, k and v."""
