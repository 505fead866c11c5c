"""Attention over context-parallel ranks with gathered keys and values, or with heads in place of the sequence.

All-gather (as in Llama 3, arXiv:2407.21783): the forward all-gathers keys and values before attention; the backward
reduce-scatters their gradients. This is cheap where there are few key groups. The communication overlaps with nothing.

All-to-all (a2a, DeepSpeed Ulysses, arXiv:2309.14509): one all-to-all trades the sharding of the sequence for a sharding
of the heads, so that each rank computes the whole sequence for some heads; another one trades the output back. A rank
sends fewer bytes the more ranks there are. The number of ranks must divide both the heads and the key groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.tile_kernels import Causal
from megatron.core.attention.tiles import chunk_order, rank_spans
from megatron.core.collectives import all_gather_sequence, swap_blocks
from megatron.core.parallel_state import Axis


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, cp: Axis, causal: Causal, sinks: Tensor | None = None
) -> Tensor:
    """q [s/cp, b, heads, d], k [s/cp, b, groups, d], v [..., dv], sharded by `rank_spans`, sinks [heads] ->
    [s/cp, b, heads, dv]"""
    kv = from_rank_order(all_gather_sequence(torch.cat((k, v), dim=-1), cp), cp.size)
    k, v = kv.split((k.shape[-1], v.shape[-1]), dim=-1)
    return local_attention(q, k, v, causal, rank_spans(kv.shape[0], cp.rank, cp.size), sinks)


def from_rank_order(x: Tensor, size: int) -> Tensor:
    """x [s, ...] concatenated in rank order -> [s, ...] in sequence order"""
    if size == 1:
        return x
    chunks, order = x.chunk(2 * size), chunk_order(size)
    return torch.cat([chunks[order.index(chunk)] for chunk in range(2 * size)])


def to_rank_order(x: Tensor, size: int) -> Tensor:
    """x [s, ...] in sequence order -> [s, ...] concatenated in rank order"""
    if size == 1:
        return x
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[chunk] for chunk in chunk_order(size)])


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, cp: Axis, causal: Causal, sinks: Tensor | None = None) -> Tensor:
    """q [s/cp, b, heads, d], k [s/cp, b, groups, d], v [..., dv], sharded by `rank_spans`, sinks [heads / cp] of this
    rank's heads -> [s/cp, b, heads, dv]

    Rank r computes heads r * heads / cp to (r + 1) * heads / cp - 1.
    """
    parts = [x.unflatten(2, (cp.size, -1)).flatten(3) for x in (q, k, v)]  # [s/cp, b, cp, heads/cp * d]
    widths = [part.shape[3] for part in parts]
    qkv = sequence_to_heads(torch.cat(parts, dim=3), cp)
    heads = zip(qkv.split(widths, dim=2), (q, k, v), strict=True)
    q, k, v = (part.unflatten(2, (-1, x.shape[3])) for part, x in heads)
    return heads_to_sequence(local_attention(q, k, v, causal, sinks=sinks), cp).flatten(2, 3)


def sequence_to_heads(x: Tensor, cp: Axis) -> Tensor:
    """x [s/cp, b, cp, ...], sharded by `rank_spans` -> [s, b, ...]: the whole sequence of block cp.rank of dim 2"""
    return from_rank_order(swap_blocks(x.movedim(2, 0), cp).flatten(0, 1), cp.size)  # dim 0 of blocks: source rank


def heads_to_sequence(x: Tensor, cp: Axis) -> Tensor:
    """x [s, b, ...] -> [s/cp, b, cp, ...]: `sequence_to_heads` undone"""
    return swap_blocks(to_rank_order(x, cp.size).unflatten(0, (cp.size, -1)), cp).movedim(0, 2)
