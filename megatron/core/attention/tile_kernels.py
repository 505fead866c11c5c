"""Kernels that compute the attention of one tile (`megatron.core.attention.tiles`), and the interface of these kernels.

The forward pass also returns the log-sum-exp of each row, which is used to merge the outputs of several tiles:

    out = sum over tiles of exp(lse_tile - lse) * out_tile,   lse = log of the sum over tiles of exp(lse_tile)

The backward pass receives the merged output and log-sum-exp. Shapes: q [n, b, heads, d], k [m, b, groups, d], v [m, b,
groups, dv], out [n, b, heads, dv], lse [n, b, heads]; the heads of a group are adjacent. `TorchKernel` supports all
features in plain torch. Extensions provide other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.attention.tiles import Documents, Shards, Tile, even_shards
from megatron.core.attention.varlen import PackedKernel
from megatron.core.dropout import attention_dropout

Outputs = tuple[Tensor, Tensor]
"""Output [n, b, heads, dv] and log-sum-exp [n, b, heads] of a tile."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of the queries, keys and values of a tile."""


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights. Masks are functions of positions and sample numbers, so they are identical under
    every layout."""

    p: float
    key: int
    head_offset: int
    """Index, among all heads of the layer, of the first head that this rank computes."""

    sample_index: Tensor


@dataclass(frozen=True)
class Rows:
    """Output gradient [n, b, heads, dv] of some query rows, and the output and log-sum-exp of these rows, merged over
    all tiles."""

    grad: Tensor
    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """Kernel that computes attention tile by tile. A kernel may yield the tiles in any order."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        """Yield each tile with its outputs. q, k and v contain the rows of all tiles."""

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        """Yield each tile with its gradients. `rows`, q, k and v contain the rows of all tiles."""

    @property
    def needs_places(self) -> bool:
        """Return True if the kernel needs positions even for tiles without a mask, for example for dropout or ALiBi."""

    @property
    def most_queries(self) -> int | None:
        """Return the maximum number of queries in a tile, which limits the memory for the scores of a tile; None if
        there is no limit."""

    @property
    def packed(self) -> PackedKernel | None:
        """Return the kernel that computes whole samples in one launch; None if there is no such kernel."""


@dataclass(frozen=True)
class Causal:
    """Parameters of a causal mask, and the kernel that computes attention with this mask."""

    kernel: Kernel
    documents: Documents | None = None
    """Start positions of the documents in each sample; None if each sample is one document."""
    window: int | None = None
    """Number of keys that a query can see, including the key at the query's own position; None if it can see all
    earlier keys."""
    shards: Shards | None = None
    """Positions of the tokens on each context-parallel rank; None for the default sharding."""

    def shards_of(self, rows: int, ranks: int) -> Shards:
        """Return the positions of the tokens on each of `ranks` ranks, if each rank holds `rows` tokens."""
        return self.shards or even_shards(rows * ranks, ranks)


def samples_of(tile: Tile) -> slice:
    """Return a slice that selects the samples of a tile in the batch dimension b."""
    return slice(None) if tile.sample is None else slice(tile.sample, tile.sample + 1)


def query_rows(x: Tensor, tile: Tile) -> Tensor:
    """Select the rows of a tile's queries: x [queries, b, ...] -> [n, b or 1, ...]."""
    return x[tile.queries.start : tile.queries.stop, samples_of(tile)]


def key_rows(x: Tensor, tile: Tile) -> Tensor:
    """Select the rows of a tile's keys: x [keys, b, ...] -> [m, b or 1, ...]."""
    return x[tile.keys.start : tile.keys.stop, samples_of(tile)]


def distances(tile: Tile, device: torch.device) -> Tensor:
    """Return an int64 tensor [n, m] with the position of each query minus the position of each key."""
    queries = torch.arange(len(tile.queries), device=device)[:, None] + tile.offset
    return queries - torch.arange(len(tile.keys), device=device)


def hidden_pairs(tile: Tile, device: torch.device) -> Tensor | None:
    """Return a bool tensor [n, m] that is True for masked pairs; None if every query sees all keys of the tile."""
    if not tile.diagonal and tile.window is None:
        return None
    distance = distances(tile, device)
    hidden = distance < 0
    return hidden if tile.window is None else hidden | (distance >= tile.window)


class TorchKernel:
    """Attention in plain torch for any device and dtype, with optional dropout, ALiBi biases and a soft cap on the
    scores. The softmax of 16-bit scores is computed in fp32.

    `slopes` [heads] are the ALiBi slopes of the local heads (`core_attention.alibi_slopes`), in the dtype of the
    scores. With a `cap` c, the scaled query-key products z become c tanh(z / c) before ALiBi and masks are applied
    (Gemma 2, arXiv 2408.00118).
    """

    needs_places = True
    packed: PackedKernel | None = None
    most_queries: int | None = 1024

    def __init__(
        self,
        scale: float,
        dropout: Dropout | None = None,
        slopes: Tensor | None = None,
        cap: float | None = None,
        note: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Create the kernel.

        Args:
            scale: Factor by which attention scores are multiplied.
            dropout: Dropout of attention weights.
            slopes: ALiBi slopes [heads].
            cap: Soft cap c of attention scores; scores z become c tanh(z / c).
            note: Function that the forward pass calls for each tile with the largest score of each head, a tensor
                [heads].
        """
        self.scale = scale
        self.dropout = dropout
        self.slopes = slopes
        self.cap = cap
        self.note = note

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        for tile in tiles:
            yield tile, self._forward(query_rows(q, tile), key_rows(k, tile), key_rows(v, tile), tile)

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        for tile in tiles:
            part = Rows(*(query_rows(x, tile) for x in (rows.grad, rows.out, rows.lse)))
            yield tile, self._backward(part, query_rows(q, tile), key_rows(k, tile), key_rows(v, tile), tile)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Outputs:
        scores = self._masked_(self._scores(q, k), tile)
        if self.note is not None:
            self.note(scores.amax((0, 2, 3)))
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse[..., None]).exp_()
        factors = self._dropout_factors(weights, tile)
        if factors is not None:
            weights.mul_(factors)
        out = _grouped(weights, k).to(v.dtype).matmul(v.permute(1, 2, 0, 3))  # [b, groups, heads / groups * n, dv]
        return _rows_of(out, q), lse.permute(2, 0, 1)

    def _backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Gradients:
        """Compute the gradients of q, k and v from the gradient dO of the output O. P is the softmax of the scores S,
        and D is the dropout mask. The gradient of the scores is dS = P * (D * dO vᵀ - rowsum(dO * O)), and the gradient
        of v is dV = (D * P)ᵀ dO.

        If scores S are capped at c, dS is also multiplied by 1 - (S / c)², the derivative of the cap.
        """
        scores = self._scores(q, k)
        slope = None if self.cap is None else (scores / self.cap).square_().neg_().add_(1)
        weights = self._masked_(scores, tile).sub_(rows.lse.permute(1, 2, 0)[..., None]).exp_()  # [b, heads, n, m]
        grad_out = _by_group(rows.grad, k)  # [b, groups, r * n, dv], r = heads / groups
        grad_weights = grad_out.matmul(v.permute(1, 2, 3, 0)).view(weights.shape).to(weights.dtype)
        factors = self._dropout_factors(weights, tile)
        if factors is not None:
            grad_weights.mul_(factors)
        delta = (rows.grad.to(weights.dtype) * rows.out.to(weights.dtype)).sum(-1).permute(1, 2, 0)
        grad_scores = grad_weights.sub_(delta[..., None]).mul_(weights).mul_(self.scale)
        if slope is not None:
            grad_scores.mul_(slope)
        if factors is not None:
            weights.mul_(factors)
        ds = _grouped(grad_scores, k).to(q.dtype)
        dq = _rows_of(ds.matmul(k.permute(1, 2, 0, 3)), q)
        dk = ds.transpose(-1, -2).matmul(_by_group(q, k)).permute(2, 0, 1, 3)
        dv = _grouped(weights, k).to(v.dtype).transpose(-1, -2).matmul(grad_out).permute(2, 0, 1, 3)
        return dq, dk, dv

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores of all query-key pairs, [b, heads, n, m] in fp32 or fp64."""
        (n, b, heads, _), m = q.shape, k.shape[0]
        # Scale q before the matrix product, because the product of unscaled fp16 operands could overflow.
        scores = _by_group(q * self.scale, k).matmul(k.permute(1, 2, 3, 0)).view(b, heads, n, m)
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))
        return scores if self.cap is None else scores.div_(self.cap).tanh_().mul_(self.cap)

    def _masked_(self, scores: Tensor, tile: Tile) -> Tensor:
        """Add ALiBi biases to the scores, and set the scores of masked pairs to -inf, in place."""
        if self.slopes is not None:
            scores.addcmul_(self.slopes[:, None, None], distances(tile, scores.device).to(scores.dtype), value=-1)
        hidden = hidden_pairs(tile, scores.device)
        return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))

    def _dropout_factors(self, weights: Tensor, tile: Tile) -> Tensor | None:
        """Return the dropout mask [b, heads, n, m] with the values 0 and 1 / (1 - p); None without dropout."""
        if self.dropout is None:
            return None
        d = self.dropout
        ones, samples = torch.ones_like(weights), d.sample_index[samples_of(tile)]
        return attention_dropout(ones, d.p, d.key, samples, d.head_offset, tile.first_query, tile.first_key)


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """Rearrange the rows of x by query group: x [n, b, heads, d] -> [b, groups, heads / groups * n, d]. `k` [m, b,
    groups, d] determines the number of groups."""
    return x.unflatten(2, (k.shape[2], -1)).permute(1, 2, 3, 0, 4).flatten(2, 3)


def _grouped(weights: Tensor, k: Tensor) -> Tensor:
    """Rearrange attention weights by query group: [b, heads, n, m] -> [b, groups, heads / groups * n, m]."""
    return weights.view(weights.shape[0], k.shape[2], -1, weights.shape[-1])


def _rows_of(x: Tensor, q: Tensor) -> Tensor:
    """Rearrange x to the shape of q: x [b, groups, heads / groups * n, d] -> [n, b, heads, d]."""
    n, b, heads, _ = q.shape
    return x.view(b, heads, n, -1).permute(2, 0, 1, 3)
