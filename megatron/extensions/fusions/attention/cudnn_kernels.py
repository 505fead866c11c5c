"""cuDNN's attention for GPUs as a kernel of tiles (`megatron.core.attention.tile_kernels`), in 16 bits.

cuDNN makes a plan for each shape, which takes longer than a step. So it computes the tiles of context parallelism,
whose shapes are few. Documents and windows, whose lengths differ from batch to batch, are left to FlashAttention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.attention.tile_kernels import Gradients, Outputs, Rows, key_rows, query_rows
from megatron.core.attention.tiles import Tile
from megatron.core.attention.varlen import Sequences


class CudnnKernel:
    """Tiles without a window, one launch each."""

    needs_places, most_queries = False, None

    def __init__(self, scale: float) -> None:
        self.scale, self.packed = scale, CudnnPackedKernel(scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        for tile in tiles:
            assert tile.window is None, "windows are left to FlashAttention"
            qkv = _by_head(query_rows(q, tile)), _by_head(key_rows(k, tile)), _by_head(key_rows(v, tile))
            out, lse = cudnn_forward(qkv, tile.diagonal, self.scale)
            yield tile, (out.permute(2, 0, 1, 3), lse.squeeze(-1).permute(2, 0, 1))

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        for tile in tiles:
            grad, queries, out = (_by_head(query_rows(x, tile)) for x in (rows.grad, q, rows.out))
            qkv = queries, _by_head(key_rows(k, tile)), _by_head(key_rows(v, tile))
            lse = query_rows(rows.lse, tile).permute(1, 2, 0).contiguous()[..., None]
            dq, dk, dv = cudnn_backward(grad, qkv, (out, lse), tile.diagonal, self.scale)
            yield tile, (dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3))


class CudnnPackedKernel:
    """Whole samples of one length, packed one after another."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        out, lse = cudnn_forward(tuple(_of_samples(x, sequences) for x in (q, k, v)), True, self.scale)
        return out.transpose(1, 2).flatten(0, 1), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...], sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = [_of_samples(x, sequences) for x in (grad, q, k, v, kept[0])]
        grads = cudnn_backward(rows[0], tuple(rows[1:4]), (rows[4], kept[1]), True, self.scale)
        dq, dk, dv = (x.transpose(1, 2).flatten(0, 1) for x in grads)
        return dq, dk, dv


def _by_head(x: Tensor) -> Tensor:
    """[n, b, heads, d] -> [b, heads, n, d]"""
    return x.permute(1, 2, 0, 3)


def _of_samples(x: Tensor, sequences: Sequences) -> Tensor:
    """[b * s, heads, d] -> [b, heads, s, d]"""
    samples = len(sequences.starts) - 1
    assert sequences.window is None and samples * sequences.longest == len(x), "documents are left to FlashAttention"
    return x.unflatten(0, (samples, -1)).transpose(1, 2)


def cudnn_forward(qkv: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, heads, n, d], k [b, groups, m, d] and v [b, groups, m, dv] -> output [b, heads, n, dv] and log-sum-exp
    [b, heads, n, 1] in fp32"""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(*qkv, None, True, 0.0, causal, False, scale=scale)[:2]


def cudnn_backward(
    grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, Tensor], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from grad [b, heads, n, dv] and what the forward returned."""
    n, m = qkv[0].shape[2], qkv[1].shape[2]
    unused = torch.zeros((), dtype=torch.int64, device=grad.device)  # the random state of dropout, which is off
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, *qkv, *kept, unused, unused, None, None, None, n, m, 0.0, causal, scale=scale
    )
