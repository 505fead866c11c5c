"""Context-parallel attention by all-gather of keys and values, or by all-to-all of heads.

All-gather (as in Llama 3, arXiv:2407.21783): the forward pass all-gathers the keys and values before it computes
attention. The backward pass reduce-scatters the gradients of keys and values. The communication volume is proportional
to the number of key-value heads. The communication does not overlap with computation.

All-to-all (a2a, DeepSpeed Ulysses, arXiv:2309.14509): the first all-to-all exchanges sequence shards for head shards,
so that each rank computes attention over the whole sequence for some of the heads. A second all-to-all restores the
sequence shards of the output. The number of bytes that each rank sends decreases as the number of ranks grows. The
number of query heads and the number of key-value heads must be multiples of the number of ranks.

All-to-all combined with a ring (a2a+p2p, like LoongTrain's 2D attention, arXiv:2406.18485): groups of neighbouring
ranks, such as the ranks of one node, exchange heads by an all-to-all. Ranks that have the same index within their
groups form a ring, along which keys and values are passed. This method sends less data between nodes than a single
ring, and needs fewer heads than an all-to-all over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from megatron.core.attention.context_parallel import Ring, RingAttention, local_attention
from megatron.core.attention.tile_kernels import Causal
from megatron.core.attention.tiles import Shards, Spans, chunk_order, merged, rank_spans, rows_of
from megatron.core.collectives import all_gather_sequence, swap_blocks
from megatron.core.parallel_state import Axis


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, cp: Axis, causal: Causal, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention after an all-gather of keys and values.

    Args:
        q: [s/cp, b, heads, d], queries at the positions that `causal.shards` assigns to this rank.
        k: [s/cp, b, groups, d], keys.
        v: [s/cp, b, groups, dv], values.
        cp: Context-parallel ranks.
        causal: Causal mask, including the sequence shards of all ranks.
        sinks: [heads], logits of attention sinks.

    Returns:
        Attention outputs [s/cp, b, heads, dv] for the queries of this rank.
    """
    if causal.shards is not None:
        return _gathered(q, torch.cat((k, v), dim=-1), k.shape[-1], cp, causal, causal.shards, sinks)
    kv = from_rank_order(all_gather_sequence(torch.cat((k, v), dim=-1), cp), cp.size)
    k, v = kv.split((k.shape[-1], v.shape[-1]), dim=-1)
    return local_attention(q, k, v, causal, rank_spans(kv.shape[0], cp.rank, cp.size), sinks)


def _gathered(
    q: Tensor, kv: Tensor, width: int, cp: Axis, causal: Causal, shards: Shards, sinks: Tensor | None
) -> Tensor:
    """Compute attention after an all-gather of keys and values, for arbitrary sequence shards. The first `width`
    channels of `kv` [s/cp, b, groups, d + dv] are the keys, and the other channels are the values. Each rank sends only
    the keys and values that the queries of other ranks attend to."""
    held, sent = shards.held[cp.rank], shards.sent[cp.rank]
    spans, parts = list(held), list(kv.split([len(span) for span in held]))
    if sent:
        rows = kv if sent == held else _rows(kv, rows_of(held, sent))
        of_ranks = all_gather_sequence(rows, cp).split([len(span) for rank in shards.sent for span in rank])
        sources = [rank for rank, each in enumerate(shards.sent) for _ in each]
        others = [place for place, rank in enumerate(sources) if rank != cp.rank]
        every = [span for each in shards.sent for span in each]
        spans += [every[place] for place in others]
        parts += [of_ranks[place] for place in others]
    order = sorted(range(len(spans)), key=lambda place: spans[place].start)
    k, v = torch.cat([parts[place] for place in order]).split((width, kv.shape[-1] - width), dim=-1)
    keys = merged(tuple(spans[place] for place in order))
    out: Tensor = RingAttention.apply(q, k, v, sinks, Ring(Axis(), held, (keys,), causal))
    return out


def _rows(x: Tensor, rows: Spans) -> Tensor:
    """Return the rows of x [m, ...] that lie in the spans `rows`, as one tensor [n, ...]."""
    return torch.cat([x[each.start : each.stop] for each in rows])


def from_rank_order(x: Tensor, size: int) -> Tensor:
    """Reorder x [s, ...], the concatenated shards of all ranks, to sequence order."""
    if size == 1:
        return x
    chunks, order = x.chunk(2 * size), chunk_order(size)
    return torch.cat([chunks[order.index(chunk)] for chunk in range(2 * size)])


def to_rank_order(x: Tensor, size: int) -> Tensor:
    """Reorder x [s, ...], which is in sequence order, so that the rows of each rank's shard are contiguous and the
    shards follow each other in rank order."""
    if size == 1:
        return x
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[chunk] for chunk in chunk_order(size)])


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, cp: Axis, causal: Causal, sinks: Tensor | None = None) -> Tensor:
    """Compute attention after an all-to-all that exchanges sequence shards for heads (DeepSpeed Ulysses).

    Rank r computes heads r * heads / cp through (r + 1) * heads / cp - 1.

    Args:
        q: [s/cp, b, heads, d], queries at the positions that `rank_spans` assigns to this rank.
        k: [s/cp, b, groups, d], keys.
        v: [s/cp, b, groups, dv], values.
        cp: Context-parallel ranks.
        causal: Attention mask.
        sinks: [heads / cp], attention sink logits of the heads that this rank computes.

    Returns:
        Attention outputs [s/cp, b, heads, dv] for the queries of this rank.
    """
    qkv, split = _by_rank(q, k, v, cp)
    q, k, v = split(sequence_to_heads(qkv, cp))
    return heads_to_sequence(local_attention(q, k, v, causal, sinks=sinks), cp).flatten(2, 3)


def nested_attention(q: Tensor, k: Tensor, v: Tensor, cp: Axis, causal: Causal, sinks: Tensor | None = None) -> Tensor:
    """Compute attention over two levels of ranks: inner ranks exchange heads by an all-to-all, and outer ranks form a
    ring.

    Args:
        q: [s/cp, b, heads, d], queries at the positions that `causal.shards` assigns to this rank.
        k: [s/cp, b, groups, d], keys.
        v: [s/cp, b, groups, dv], values.
        cp: Context-parallel ranks; `cp.levels` contains the inner and the outer ranks.
        causal: Causal mask, including the sequence shards of all ranks.
        sinks: [heads / inner], attention sink logits of the heads that this rank computes.

    Returns:
        Attention outputs [s/cp, b, heads, dv] for the queries of this rank.
    """
    inner, outer = cp.levels
    shards = causal.shards_of(q.shape[0], cp.size)
    groups = [tuple(chain(*shards.held[rank : rank + inner.size])) for rank in range(0, cp.size, inner.size)]
    held = tuple(merged(tuple(sorted(spans, key=_start))) for spans in groups)
    own = groups[outer.rank]
    qkv, split = _by_rank(q, k, v, inner)
    q, k, v = split(_ascending(swap_blocks(qkv.movedim(2, 0), inner).flatten(0, 1), own))  # [s/outer, b, ...]
    out: Tensor = RingAttention.apply(q, k, v, sinks, Ring(outer, held[outer.rank], held, causal, held))
    blocks = _as_held(out, own).unflatten(0, (inner.size, -1))
    return swap_blocks(blocks, inner).movedim(0, 2).flatten(2, 3)


def _by_rank(q: Tensor, k: Tensor, v: Tensor, ranks: Axis) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Concatenate q [s/cp, b, heads, d], k [s/cp, b, groups, d] and v [s/cp, b, groups, dv], so that one all-to-all can
    exchange all three. Return the concatenated tensor [s/cp, b, ranks, channels] and a function. Slice i of dimension 2
    of the tensor contains the query heads, keys and values that the all-to-all sends to rank i. The function splits a
    received slice [s, b, channels] into queries, keys and values."""
    parts = [x.unflatten(2, (ranks.size, -1)).flatten(3) for x in (q, k, v)]
    widths, channels = [part.shape[3] for part in parts], [x.shape[3] for x in (q, k, v)]

    def split(rows: Tensor) -> list[Tensor]:
        return [part.unflatten(2, (-1, d)) for part, d in zip(rows.split(widths, dim=2), channels, strict=True)]

    return torch.cat(parts, dim=3), split


def _start(span: range) -> int:
    return span.start


def _ascending(x: Tensor, spans: Spans) -> Tensor:
    """Sort the rows of x [m, ...] by position. The rows of x are in the order of `spans`."""
    parts = x.split([len(span) for span in spans])
    return torch.cat([parts[place] for place in sorted(range(len(spans)), key=lambda place: spans[place].start)])


def _as_held(x: Tensor, spans: Spans) -> Tensor:
    """Reorder the rows of x [m, ...], which are sorted by position, to the order of `spans`. This function is the
    inverse of `_ascending`."""
    order = sorted(range(len(spans)), key=lambda place: spans[place].start)
    parts = x.split([len(spans[place]) for place in order])
    return torch.cat([parts[order.index(place)] for place in range(len(spans))])


def sequence_to_heads(x: Tensor, cp: Axis) -> Tensor:
    """Exchange sequence shards x [s/cp, b, cp, ...] for whole sequences [s, b, ...] by an all-to-all. Each rank
    receives the whole sequence of one slice of dimension 2, x[:, :, cp.rank]. `rank_spans` defines which positions are
    in the sequence shard of each rank."""
    # dimension 0 of the exchanged tensor is the index of the rank that sent the block
    return from_rank_order(swap_blocks(x.movedim(2, 0), cp).flatten(0, 1), cp.size)


def heads_to_sequence(x: Tensor, cp: Axis) -> Tensor:
    """Exchange whole sequences x [s, b, ...] for sequence shards [s/cp, b, cp, ...] by an all-to-all. This function is
    the inverse of `sequence_to_heads`."""
    return swap_blocks(to_rank_order(x, cp.size).unflatten(0, (cp.size, -1)), cp).movedim(0, 2)
