"""Attention among the tokens of several context-parallel ranks, or of a single rank.

Ring attention (p2p, arXiv:2310.01889): queries stay on their rank, while keys and values rotate over the ranks. While a
rank receives the next keys, it computes attention from its queries to the keys that it already has. In the backward
pass, keys and values rotate over the ranks again. The gradients of keys and values rotate together with the keys and
values, and reach the owner of the keys after the last step. For the backward pass, each rank saves only its own
queries, keys, values, outputs and log-sum-exps. Attention within a single rank is computed as ring attention over one
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.attention.tile_kernels import Causal, Rows, key_rows, query_rows
from megatron.core.attention.tiles import Spans, Tile, causal_tiles, joined, rows_of, short_spans
from megatron.core.attention.varlen import add_sinks_, packed_attention, sinks_grad
from megatron.core.collectives import RingExchange
from megatron.core.parallel_state import Axis
from megatron.core.torch_private import AutogradContext


def ring_attention(q: Tensor, k: Tensor, v: Tensor, cp: Axis, causal: Causal, sinks: Tensor | None = None) -> Tensor:
    """Compute ring attention: q [s/cp, b, heads, d], k [s/cp, b, groups, d], v [s/cp, b, groups, dv], sinks [heads] ->
    [s/cp, b, heads, dv]. The tokens must be sharded over the ranks as `causal.shards` specifies."""
    shards = causal.shards_of(q.shape[0], cp.size)
    return RingAttention.apply(q, k, v, sinks, Ring(cp, shards.held[cp.rank], shards.held, causal, shards.sent))


@dataclass(frozen=True)
class Ring:
    """Tiles of queries and keys that this rank computes in each step of ring attention. A ring may also consist of a
    single rank."""

    cp: Axis
    queries: Spans
    """Positions of the queries for which this rank computes attention."""
    keys: tuple[Spans, ...]
    """Positions of the keys on each rank."""
    causal: Causal
    sent: tuple[Spans, ...] = ()
    """Positions of the keys that each rank sends. All ranks send the same number of keys."""

    @property
    def steps(self) -> int:
        """Return the number of ranks whose keys this rank needs, counting this rank itself."""
        return self.cp.size if any(self.sent) else 1

    @cached_property
    def rows_sent(self) -> Spans | None:
        """Rows of the keys that this rank sends to other ranks; None if the rank sends all of its keys or no keys."""
        if self.steps == 1 or self.sent[self.cp.rank] == self.keys[self.cp.rank]:
            return None
        return rows_of(self.keys[self.cp.rank], self.sent[self.cp.rank])

    def sent_of(self, x: Tensor) -> Tensor:
        """Select the rows that this rank sends to the other ranks: x [m, ...] -> [sent, ...]."""
        return x if self.rows_sent is None else torch.cat([x[rows.start : rows.stop] for rows in self.rows_sent])

    def with_sent(self, x: Tensor, sent: Tensor) -> Tensor:
        """Overwrite the rows of x [m, ...] that this rank sends to other ranks. `sent` [sent, ...] contains the new
        values of these rows. The returned tensor may be x itself, modified in place."""
        if self.rows_sent is None:
            return sent
        for rows, part in zip(self.rows_sent, sent.split([len(rows) for rows in self.rows_sent]), strict=True):
            x[rows.start : rows.stop] = part
        return x

    def tiles(self, step: int) -> tuple[Tile, ...]:
        """Return the tiles that pair this rank's queries with the keys that the rank holds in ring step `step`."""
        source, kernel = (self.cp.rank - step) % self.cp.size, self.causal.kernel
        queries = self.queries if kernel.most_queries is None else short_spans(self.queries, kernel.most_queries)
        keys = self.sent[source] if step else self.keys[source]
        found = causal_tiles(queries, keys, self.causal.documents, self.causal.window)
        return found if kernel.needs_places else joined(found)


class RingContext(AutogradContext):
    ring: Ring


class RingAttention(torch.autograd.Function):
    """Autograd Function that computes ring attention: q [n, b, heads, d], k [m, b, groups, d] and v [m, b, groups, dv]
    of this rank, sinks [heads] or None -> [n, b, heads, dv]. Outputs of several tiles are summed in fp32 or fp64."""

    @staticmethod
    def forward(ctx: RingContext, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty((*q.shape[:3], v.shape[-1]), dtype=wide, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        keys, values = k, v
        passed = ring.sent_of(k), ring.sent_of(v)
        for step in range(ring.steps):
            arriving = None
            if step + 1 < ring.steps:
                arriving = RingExchange(_joined(*passed), ring.cp, tag=0)
            for tile, (part, part_lse) in ring.causal.kernel.forward(q, keys, values, ring.tiles(step)):
                _merge_(query_rows(out, tile), query_rows(lse, tile), part, part_lse, tile.diagonal)
            if arriving is not None:
                keys, values = passed = _parted(arriving.wait(), *passed)
        if sinks is not None:
            add_sinks_(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: RingContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        keys, values = k, v
        ring, rows = ctx.ring, Rows(grad, out, lse)
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        coming: RingExchange | None = None
        passed = ring.sent_of(k), ring.sent_of(v)
        for step in range(ring.steps):
            arriving = None
            if step + 1 < ring.steps:
                arriving = RingExchange(_joined(*passed), ring.cp, tag=0)
            dkv = torch.zeros(keys.numel() + values.numel(), dtype=lse.dtype, device=q.device)
            dk, dv = _parted(dkv, keys, values)
            for tile, parts in ring.causal.kernel.backward(rows, q, keys, values, ring.tiles(step)):
                query_rows(dq, tile).add_(parts[0])
                key_rows(dk, tile).add_(parts[1])
                key_rows(dv, tile).add_(parts[2])
            if not step:
                own = dk, dv
                dkv = dkv if ring.rows_sent is None else _joined(ring.sent_of(dk), ring.sent_of(dv))
            if coming is not None:
                dkv += coming.wait()
            if ring.steps > 1:
                coming = RingExchange(dkv, ring.cp, tag=1)
            if arriving is not None:
                keys, values = passed = _parted(arriving.wait(), *passed)
        dk, dv = own
        if coming is not None:
            dk, dv = map(ring.with_sent, own, _parted(coming.wait(), ring.sent_of(k), ring.sent_of(v)))
        of_sinks = None if sinks is None else sinks_grad(grad, out, lse, sinks)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), of_sinks, None


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """Concatenate k and v into a flat tensor that can be sent as a single message."""
    return torch.cat((k.flatten(), v.flatten()))


def _parted(joined: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Split a flat tensor into parts with the shapes of k and v."""
    of_k, of_v = joined.split((k.numel(), v.numel()))
    return of_k.view(k.shape), of_v.view(v.shape)


def _merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, first: bool) -> None:
    """Merge the output `part` [n, b, heads, d] and the log-sum-exp `part_lse` [n, b, heads] of a tile into `out` and
    `lse`, the results for the tile's queries so far."""
    if first:
        out.copy_(part)
        lse.copy_(part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_()[..., None])
    out.addcmul_(part.to(out.dtype), (part_lse - total).exp_()[..., None])
    lse.copy_(total)


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, queries: Spans | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention within a rank: q [n, b, heads, d], k [s, b, groups, d], v [s, b, groups, dv], sinks [heads] ->
    [n, b, heads, dv].

    The keys are at positions 0 to s - 1. `queries` are the positions of the queries; by default, they are the positions
    of the keys. If the kernel has a method `at_once`, a single kernel launch computes all tiles. A variable-length
    kernel also needs only one launch if the queries are whole samples. Other kernels compute attention tile by tile, in
    the same way as ring attention on a single rank.
    """
    whole = (range(k.shape[0]),)
    if (at_once := getattr(causal.kernel, "at_once", None)) is not None:
        out: Tensor = at_once(q, k, v, causal_tiles(queries or whole, whole, causal.documents, causal.window), sinks)
        return out
    if queries is None and causal.kernel.packed is not None:
        return packed_attention(q, k, v, causal.documents, causal.window, causal.kernel.packed, sinks)
    return RingAttention.apply(q, k, v, sinks, Ring(Axis(), queries or whole, (whole,), causal))
