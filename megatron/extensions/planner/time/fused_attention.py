"""GPU attention in a recorded step: the fake kernel that stands for FlashAttention and cuDNN, whatever the tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.attention.tile_kernels import Dropout, Gradients, Outputs, Rows, key_rows, query_rows
from megatron.core.attention.tiles import Tile
from megatron.core.attention.varlen import Sequences
from megatron.core.config.layers import Span
from megatron.extensions.fusions.attention.flash_dropout.bands import band_of
from megatron.extensions.planner.as_on_gpus import PlannedDropoutKernel
from megatron.extensions.planner.time.recorder import Recorder


class RecordedKernel:
    """Tiles of attention, one launch each, and whole samples in one launch."""

    needs_places, most_queries = False, None

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.packed = recorder, RecordedPackedKernel(recorder)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        for tile in tiles:
            queries = query_rows(q, tile)
            self._launch(queries, v, tile, False)
            yield tile, (queries.new_empty(*queries.shape[:-1], v.shape[-1]), _statistics(queries))

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        for tile in tiles:
            queries = query_rows(q, tile)
            self._launch(queries, v, tile, True)
            keys, values = key_rows(k, tile), key_rows(v, tile)
            yield tile, (queries.new_empty(queries.shape), keys.new_empty(keys.shape), values.new_empty(values.shape))

    def _launch(self, q: Tensor, v: Tensor, tile: Tile, backward: bool) -> None:
        (_, samples, heads, width), keys = q.shape, len(tile.keys)
        pairs = seen_pairs(tile) * samples * heads
        self.recorder.attention(pairs, width, v.shape[-1], min(keys, tile.window or keys), backward)


class RecordedDropoutKernel(PlannedDropoutKernel):
    """All tiles in one launch of the fused kernel with dropout."""

    def __init__(self, recorder: Recorder, scale: float, dropout: Dropout) -> None:
        super().__init__(scale, dropout)
        self.recorder = recorder

    def launched(self, q: Tensor, v: Tensor, tiles: tuple[Tile, ...], backward: bool) -> None:
        (_, samples, heads, width), keys = q.shape, band_of(tiles).keys
        pairs = heads * sum(seen_pairs(tile) * (samples if tile.sample is None else 1) for tile in tiles)
        length = min(len(keys), max(tile.window or len(keys) for tile in tiles))
        self.recorder.attention_with_dropout(pairs, width, v.shape[-1], length, backward)


def seen_pairs(tile: Tile) -> float:
    """Pairs of a query and a key that it sees; within a window, of those that the tile has."""
    n, m = len(tile.queries), len(tile.keys)
    if tile.window is not None:
        return float(
            sum(max(0, min(m, i + tile.offset + 1) - max(0, i + tile.offset + 1 - tile.window)) for i in range(n))
        )
    return n * m / 2 if tile.diagonal else float(n * m)


@dataclass(frozen=True)
class RecordedPackedKernel:
    """Whole samples, packed one after another."""

    recorder: Recorder

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        self._launch(q, v, sequences, False)
        return q.new_empty(*q.shape[:-1], v.shape[-1]), _statistics(q).t()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...], sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._launch(q, v, sequences, True)
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def _launch(self, q: Tensor, v: Tensor, sequences: Sequences, backward: bool) -> None:
        rows, heads, width = q.shape
        seen = Span(sequences.window).mean(sequences.longest)
        self.recorder.attention(rows * heads * seen, width, v.shape[-1], sequences.longest, backward)


def _statistics(q: Tensor) -> Tensor:
    """The log-sum-exp of each row [..., heads]."""
    return torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
