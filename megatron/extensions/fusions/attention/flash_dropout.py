"""Attention with dropout in one fused kernel of GPUs, whose masks are those of `megatron.core.dropout`: the kernel of
tiles, its operators, and attention of all local queries.

Its twin in torch is `TorchKernel` (`megatron.core.attention.tile_kernels`): the same masks, sums in another order.

Forward as FlashAttention-2 (arXiv 2307.08691). The backward is two passes without atomic sums, one for queries and one
for keys and values, so its bits are the same in every run. Dropout masks are hashed where the scores are, and never
stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.attention.tile_kernels import Dropout, Gradients, Outputs, Rows, query_rows
from megatron.core.attention.tiles import Tile
from megatron.core.attention.varlen import add_sinks_, sinks_grad
from megatron.core.dropout import bits_of_columns
from megatron.core.host_to_device import integers_on
from megatron.extensions.fusions.attention.bands import Band, band_of
from megatron.extensions.fusions.kernel_choice import gpu_operator

WIDEST = 256
"""Channels of the widest heads that the kernel takes."""


def fits(dtype: torch.dtype, head_dim: int, value_head_dim: int) -> bool:
    """Whether the kernel computes heads of these widths in this precision."""
    widths = head_dim, value_head_dim
    return dtype in (torch.float16, torch.bfloat16) and max(widths) <= WIDEST and not any(d % 8 for d in widths)


class FlashDropoutKernel:
    """All tiles in one launch. Raises RuntimeError where GPU, precision or widths do not suit the kernel."""

    needs_places, most_queries, packed = True, None, None

    def __init__(self, scale: float, dropout: Dropout) -> None:
        self.scale, self.dropout = scale, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        if tiles:
            tile = _band(tuple(tiles)).tile
            yield tile, self.attend(query_rows(q, tile), _keys(k, tile), _keys(v, tile), tuple(tiles))

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        if tiles:
            tile = _band(tuple(tiles)).tile
            part = Rows(*(query_rows(x, tile) for x in (rows.grad, rows.out, rows.lse)))
            yield tile, self.gradients(part, query_rows(q, tile), _keys(k, tile), _keys(v, tile), tuple(tiles))

    def at_once(self, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], sinks: Tensor | None) -> Tensor:
        """Attention of all queries of a rank, which the tiles hold: q [n, b, heads, d], k [m, b, groups, d],
        v [m, b, groups, dv], sinks [heads] -> [n, b, heads, dv], by one launch."""
        return _FlashDropout.apply(q, k, v, sinks, self, tiles)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Outputs:
        """Outputs of the rows that the tiles cover: q [n, b, heads, d], k [m, b, groups, d], v [m, b, groups, dv]."""
        return _forward(*map(_dense, (q, k, v)), *_on_device(tiles, q.device), *self._settings())

    def gradients(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Gradients:
        """The gradients of the same rows."""
        operands = map(_dense, (rows.grad, rows.out))
        return _backward(*operands, rows.lse, *map(_dense, (q, k, v)), *_on_device(tiles, q.device), *self._settings())

    def _settings(self) -> tuple[float, float, int, int, Tensor]:
        d = self.dropout
        return self.scale, d.p, d.key, d.head_offset, d.sample_index


class _FlashDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        kernel: FlashDropoutKernel,
        tiles: tuple[Tile, ...],
    ) -> Tensor:
        ((_, (out, lse)),) = kernel.forward(q, k, v, tiles)
        if sinks is not None:
            add_sinks_(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.kernel, ctx.tiles = kernel, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        of_sinks = None if sinks is None else sinks_grad(grad, out, lse, sinks)
        ((tile, (dq, dk, dv)),) = ctx.kernel.backward(Rows(grad, out, lse), q, k, v, ctx.tiles)
        dk, dv = (_whole(part, x, tile) for part, x in ((dk, k), (dv, v)))
        return dq, dk, dv, of_sinks, None, None


def _whole(part: Tensor, x: Tensor, tile: Tile) -> Tensor:
    """A gradient of the rows of x that the tile has, with zeros for the others."""
    if len(part) == len(x):
        return part
    whole = torch.zeros(x.shape, dtype=part.dtype, device=part.device)
    whole[tile.keys.start : tile.keys.stop] = part
    return whole


def _keys(x: Tensor, tile: Tile) -> Tensor:
    return x[tile.keys.start : tile.keys.stop]


def _dense(x: Tensor) -> Tensor:
    """A tensor whose channels are adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _BandOnDevice(NamedTuple):
    """A `Band`, int32."""

    of_queries: Tensor
    """[2, samples, n]"""
    of_keys: Tensor
    """[2, samples, m]"""
    places: Tensor
    """[n]"""
    column_bits: Tensor
    """Hashes [m] of the keys' positions."""


@lru_cache(maxsize=64)
def _band(tiles: tuple[Tile, ...]) -> Band:
    return band_of(tiles)


@lru_cache(maxsize=64)
def _on_device(tiles: tuple[Tile, ...], device: torch.device) -> _BandOnDevice:
    """All layers and passes of a micro-batch share one copy."""
    band = _band(tiles)
    bits = bits_of_columns(torch.from_numpy(band.key_places)).numpy()
    arrays = np.stack(band.of_queries), np.stack(band.of_keys), band.query_places, bits
    flat = integers_on(device, np.concatenate([array.ravel() for array in arrays]), torch.int32)
    parts = flat.split([array.size for array in arrays])
    return _BandOnDevice(*(part.view(array.shape) for part, array in zip(parts, arrays, strict=True)))


_BAND = (
    "Tensor of_queries, Tensor of_keys, Tensor places, Tensor column_bits, "
    "float scale, float p, int key, int head_offset, Tensor sample_index"
)
"""A `_BandOnDevice`, and the settings of a kernel."""


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *band: Any) -> tuple[Tensor, Tensor]:
    n, b, heads, _ = q.shape
    return q.new_empty(n, b, heads, v.shape[-1]), q.new_empty(b, heads, n, dtype=torch.float32).permute(2, 0, 1)


_forward = gpu_operator(
    "attention.flash_dropout_triton:flash_dropout",
    f"(Tensor q, Tensor k, Tensor v, {_BAND}) -> (Tensor, Tensor)",
    _fake_forward,
)
"""Output [n, b, heads, dv] and log-sum-exp [n, b, heads] in fp32."""

_backward = gpu_operator(
    "attention.flash_dropout_triton:flash_dropout_backward",
    f"(Tensor grad, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {_BAND}) -> (Tensor, Tensor, Tensor)",
    lambda *operands: tuple(x.new_empty(x.shape) for x in operands[3:6]),
)
"""Gradients of q, k and v."""
