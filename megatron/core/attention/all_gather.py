"""Context-parallel attention by all-gather of keys and values (as in Llama 3, arXiv:2407.21783).

The forward all-gathers keys and values before attention; the backward reduce-scatters their gradients. This is cheap
where there are few key groups. The communication overlaps with nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.attention.local_attention import local_attention
from megatron.core.attention.partition import chunk_order, rank_spans
from megatron.core.attention.tile_kernels import Causal
from megatron.core.collectives import all_gather_sequence
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
