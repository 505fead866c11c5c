"""Context-parallel attention with the keys and values of the whole sequence on every rank (as in arXiv:2407.21783).

One all-gather, whose bytes are those of keys and values alone, before attention, and a reduce-scatter of their
gradients in the backward. Simple and, with few groups of keys, cheap; nothing overlaps with the communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.attention.partition import chunk_order, rank_spans
from megatron.core.attention.ring import Causal, local_attention
from megatron.core.collectives import all_gather_sequence
from megatron.core.parallel_state import Axis


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, cp: Axis, causal: Causal) -> Tensor:
    """q [s/cp, b, heads, d], k and v [s/cp, b, groups, d], as `rank_spans` cuts s -> [s/cp, b, heads, d]"""
    kv = from_rank_order(all_gather_sequence(torch.stack((k, v), dim=1), cp), cp.size)
    k, v = kv.unbind(1)
    return local_attention(q, k, v, causal, queries=rank_spans(kv.shape[0], cp.rank, cp.size))


def from_rank_order(x: Tensor, size: int) -> Tensor:
    """x [s, ...], the rows of one rank after those of the other -> in the order of the sequence"""
    if size == 1:
        return x
    chunks, order = x.chunk(2 * size), chunk_order(size)
    return torch.cat([chunks[order.index(chunk)] for chunk in range(2 * size)])


def to_rank_order(x: Tensor, size: int) -> Tensor:
    """x [s, ...] in the order of the sequence -> the rows of one rank after those of the other"""
    if size == 1:
        return x
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[chunk] for chunk in chunk_order(size)])
