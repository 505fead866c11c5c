"""Context-parallel attention by all-gather of keys and values, or by all-to-all of heads.

All-gather (as in Llama 3, arXiv:2407.21783): the forward pass all-gathers keys and values before attention. The
backward pass reduce-scatters the gradients of keys and values. The fewer key groups there are, the fewer bytes are
communicated. Communication does not overlap with computation.

All-to-all (a2a, DeepSpeed Ulysses, arXiv:2309.14509): the first all-to-all exchanges sequence shards for head shards,
so that each rank computes attention over the whole sequence for some of the heads. A second all-to-all restores the
sequence shards of the output. The more ranks there are, the fewer bytes each rank sends. The number of ranks must
divide both the heads and the key groups.

All-to-all combined with a ring (a2a+p2p, like LoongTrain's 2D attention, arXiv:2406.18485): groups of neighbouring
ranks, such as the ranks of one node, exchange heads by an all-to-all. Ranks with the same index in their groups form a
ring. Less data crosses node boundaries than with a single ring, and fewer heads are needed than with an all-to-all
alone.
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
    """Attention after an all-gather of keys and values.

    Args:
        q: [s/cp, b, heads, d], the queries of this rank's shard of `causal.shards`.
        k: [s/cp, b, groups, d].
        v: [s/cp, b, groups, dv].
        cp: Context-parallel ranks.
        causal: Attention mask, and the sequence shards of the ranks.
        sinks: [heads], logits of attention sinks.

    Returns:
        [s/cp, b, heads, dv]
    """
    if causal.shards is not None:
        return _gathered(q, torch.cat((k, v), dim=-1), k.shape[-1], cp, causal, causal.shards, sinks)
    kv = from_rank_order(all_gather_sequence(torch.cat((k, v), dim=-1), cp), cp.size)
    k, v = kv.split((k.shape[-1], v.shape[-1]), dim=-1)
    return local_attention(q, k, v, causal, rank_spans(kv.shape[0], cp.rank, cp.size), sinks)


def _gathered(
    q: Tensor, kv: Tensor, width: int, cp: Axis, causal: Causal, shards: Shards, sinks: Tensor | None
) -> Tensor:
    """Attention for arbitrary sequence shards. `kv` [s/cp, b, groups, d + dv] contains the keys in its first `width`
    channels, and the values in the other channels. Only keys that other ranks attend to are gathered."""
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
    """x [m, ...] -> [n, ...]: the selected rows"""
    return torch.cat([x[each.start : each.stop] for each in rows])


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
    """Attention that exchanges sequence shards for heads by an all-to-all (DeepSpeed Ulysses).

    Rank r computes the heads from r * heads / cp to (r + 1) * heads / cp - 1.

    Args:
        q: [s/cp, b, heads, d], the queries of this rank's shard of `rank_spans`.
        k: [s/cp, b, groups, d].
        v: [s/cp, b, groups, dv].
        cp: Context-parallel ranks.
        causal: Attention mask.
        sinks: [heads / cp], attention sink logits of the heads that this rank computes.

    Returns:
        [s/cp, b, heads, dv]
    """
    qkv, split = _by_rank(q, k, v, cp)
    q, k, v = split(sequence_to_heads(qkv, cp))
    return heads_to_sequence(local_attention(q, k, v, causal, sinks=sinks), cp).flatten(2, 3)


def nested_attention(q: Tensor, k: Tensor, v: Tensor, cp: Axis, causal: Causal, sinks: Tensor | None = None) -> Tensor:
    """Attention with an all-to-all of heads among inner ranks, and a ring of outer ranks.

    Args:
        q: [s/cp, b, heads, d], the queries of this rank's shard of `causal.shards`.
        k: [s/cp, b, groups, d].
        v: [s/cp, b, groups, dv].
        cp: Context-parallel ranks; `cp.levels` are the inner and the outer ranks.
        causal: Attention mask, and the sequence shards of the ranks.
        sinks: [heads / inner], attention sink logits of the heads that this rank computes.

    Returns:
        [s/cp, b, heads, dv]
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
    """q [s/cp, b, heads, d], k [s/cp, b, groups, d], v [..., dv] -> [s/cp, b, ranks, heads/ranks * d + ...]. The
    returned function splits one rank's [s, b, heads/ranks * d + ...] into queries, keys and values."""
    parts = [x.unflatten(2, (ranks.size, -1)).flatten(3) for x in (q, k, v)]
    widths, channels = [part.shape[3] for part in parts], [x.shape[3] for x in (q, k, v)]

    def split(rows: Tensor) -> list[Tensor]:
        return [part.unflatten(2, (-1, d)) for part, d in zip(rows.split(widths, dim=2), channels, strict=True)]

    return torch.cat(parts, dim=3), split


def _start(span: range) -> int:
    return span.start


def _ascending(x: Tensor, spans: Spans) -> Tensor:
    """x [m, ...] with rows at the positions `spans` -> [m, ...] in ascending order of positions"""
    parts = x.split([len(span) for span in spans])
    return torch.cat([parts[place] for place in sorted(range(len(spans)), key=lambda place: spans[place].start)])


def _as_held(x: Tensor, spans: Spans) -> Tensor:
    """x [m, ...] in ascending order of positions -> [m, ...] with rows at the positions `spans`: the inverse of
    `_ascending`"""
    order = sorted(range(len(spans)), key=lambda place: spans[place].start)
    parts = x.split([len(spans[place]) for place in order])
    return torch.cat([parts[order.index(place)] for place in range(len(spans))])


def sequence_to_heads(x: Tensor, cp: Axis) -> Tensor:
    """x [s/cp, b, cp, ...], sharded by `rank_spans` -> [s, b, ...]: the whole sequence of block cp.rank along dim 2"""
    # dim 0 is the source rank of a block
    return from_rank_order(swap_blocks(x.movedim(2, 0), cp).flatten(0, 1), cp.size)


def heads_to_sequence(x: Tensor, cp: Axis) -> Tensor:
    """x [s, b, ...] -> [s/cp, b, cp, ...]: the inverse of `sequence_to_heads`"""
    return swap_blocks(to_rank_order(x, cp.size).unflatten(0, (cp.size, -1)), cp).movedim(0, 2)
