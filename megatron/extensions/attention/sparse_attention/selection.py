"""Selection of keys by an indexer, computed in chunks of queries.

Equation numbers refer to DeepSeek-V3.2 (arXiv 2512.02556), section 2.1. The indexer has queries q in heads h, one key k
per token, and head weights w. The score of key j for query i is sum_h w_ih ReLU(q_ih · k_j) (equation 1).

Scores are computed for one chunk of queries at a time, so that only the scores of one chunk are in memory. In tensor
shapes, n, b and s are the numbers of queries, samples and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.attention.tiles import Spans
from megatron.core.compiled_regions import torch_function
from megatron.core.kernels import operation
from megatron.core.tensor_parallel.layers import Hardware

CHUNK = 2**27
"""Largest number of elements in any tensor that is computed for one chunk of queries."""

MERGED, MERGED_ROWS = 2**26, 1024
"""Largest number of scores and largest number of queries in a chunk that GPU kernels process."""


class Chunk(NamedTuple):
    """Consecutive queries that are processed together."""

    rows: slice
    keys: int
    """Position after the last key that any query in the chunk may attend to."""
    first: int = 0
    """Position of the first key that any query in the chunk may attend to."""

    def moved(self, start: int) -> Chunk:
        """Return a copy of this chunk with `start` subtracted from the row numbers."""
        return self._replace(rows=slice(self.rows.start - start, self.rows.stop - start))


class Queries(NamedTuple):
    """Range of keys that each query may attend to, and chunks of the queries. `first` and `last` [n, 1 or b] int64 are
    the positions of the first and the last key of each range."""

    first: Tensor
    last: Tensor
    chunks: tuple[Chunk, ...]
    hardware: Hardware
    most: int
    """Largest number of keys that a query may attend to."""

    def hidden(self, chunk: Chunk) -> Tensor:
        """Return a mask [rows, 1 or b, keys] that is True where the query may not attend to the key."""
        keys = torch.arange(chunk.first, chunk.keys, device=self.last.device)
        return (keys > self.last[chunk.rows, :, None]) | (keys < self.first[chunk.rows, :, None])


class Index(NamedTuple):
    """Queries, keys and head weights from which the indexer scores are computed."""

    q: Tensor
    """Indexer queries [n, b, indexer heads, d]."""
    k: Tensor
    """Indexer keys [s, b, d]."""
    weights: Tensor
    """Head weights [n, b, indexer heads]."""


def chunks_of(spans: Spans, shards: int, longest: int, keys: int | None = None) -> tuple[Chunk, ...]:
    """Divide queries into chunks, each of which lies within one tensor-parallel shard of the queries.

    Args:
        spans: Positions of the queries.
        shards: Number of equal shards into which the queries are divided.
        longest: Largest number of queries per chunk.
        keys: Number of cached and new tokens together; None if there are no cached tokens.
    """
    shard = sum(map(len, spans)) // shards
    found = list[Chunk]()
    row = 0
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(start + longest, span.stop, start + shard - row % shard)
            found.append(Chunk(slice(row, row + stop - start), keys or stop))
            row, start = row + stop - start, stop
    return tuple(found)


def merged(chunks: Sequence[Chunk], samples: int) -> tuple[Chunk, ...]:
    """Merge adjacent chunks as long as a merged chunk has at most `MERGED_ROWS` queries and `MERGED` scores. The
    kernels need large chunks to use the whole GPU. The kernels can process larger chunks than plain PyTorch, because
    the scores are the only intermediate results that the kernels store."""
    found = list[Chunk]()
    for chunk in chunks:
        if found:
            last = found[-1]
            rows, more = chunk.rows.stop - last.rows.start, chunk.rows.stop - chunk.rows.start
            adjacent = chunk.rows.start == last.rows.stop and 0 <= chunk.keys - last.keys <= more
            if adjacent and rows <= MERGED_ROWS and rows * samples * chunk.keys <= MERGED:
                found[-1] = last._replace(rows=slice(last.rows.start, chunk.rows.stop), keys=chunk.keys)
                continue
        found.append(chunk)
    return tuple(found)


def index_products(index: Index, chunk: Chunk) -> Tensor:
    """Return the products ReLU(q · k) [b, rows, indexer heads, keys] of each query and key. The products are fp32 for
    16-bit inputs."""
    q = index.q[chunk.rows].transpose(0, 1)
    products = (q.flatten(1, 2) @ index.k[: chunk.keys].permute(1, 2, 0)).unflatten(1, q.shape[1:3])
    return products.to(torch.promote_types(q.dtype, torch.float32)).relu_()


def index_scores(index: Index, chunk: Chunk, products: Tensor) -> Tensor:
    """Return the scores [rows, b, keys]: the products, multiplied by the head weights and summed over indexer heads."""
    weights = index.weights[chunk.rows].transpose(0, 1).to(products.dtype)
    return (weights.unsqueeze(2) @ products).squeeze(2).transpose(0, 1)


def largest(scores: Tensor, topk: int) -> Tensor:
    """Return the ascending indices [rows, b, topk] of the keys with the largest scores [rows, b, keys], as int32. Keys
    with a score of -inf are replaced by the index -1. Among keys with equal scores, later keys are selected. ReLU
    produces many equal scores; because of this rule, the selection does not depend on how queries are divided into
    chunks."""
    least = scores.topk(topk, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    wanted = topk - above.sum(-1, keepdim=True)
    latest = equal.flip(-1).cumsum(-1).flip(-1) <= wanted
    keys, last = torch.arange(scores.shape[-1], device=scores.device), scores.shape[-1] - 1
    chosen = torch.where(above | (equal & latest), keys, last + 1).topk(topk, largest=False, sorted=True).values
    # If scores are NaN, fewer than topk keys are selected, and the remaining entries contain an index that is out of
    # range.
    chosen = chosen.clamp_(max=last)
    return chosen.masked_fill_(scores.gather(-1, chosen) == -torch.inf, -1).to(torch.int32)


@operation
@torch_function
def scores_of_keys(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return the scores [n, b, keys] of each key for each query. The scores are fp32 for 16-bit inputs. The queries q
    are [n, b, indexer heads, d], the keys k are [keys, b, d], and the head weights are [n, b, indexer heads]."""
    index, chunk = Index(q, k, weights), Chunk(slice(0, len(q)), len(k))
    return index_scores(index, chunk, index_products(index, chunk))


@operation
@torch_function
def largest_scores(scores: Tensor, first: Tensor, last: Tensor, topk: int) -> Tensor:
    """Return the indices of the keys with the largest scores, as `largest` does, but only among the keys that a query
    may attend to.

    Args:
        scores: [n, b, keys].
        first: [n, 1 or b], first key that a query may attend to.
        last: [n, 1 or b], last key that a query may attend to.
        topk: Number of keys to select.
    """
    keys = torch.arange(scores.shape[-1], device=scores.device)
    hidden = (keys > last.unsqueeze(-1)) | (keys < first.unsqueeze(-1))
    return largest(scores.masked_fill(hidden, -torch.inf), topk)


@operation
@torch_function
def keys_of_chunks(index: Index, queries: Queries, topk: int) -> Tensor:
    """Select keys for each query, one chunk of queries at a time. The arguments and the result are the same as for
    `selected`."""
    return selected_in(queries.chunks, index, queries, topk)


def selected_in(chunks: Sequence[Chunk], index: Index, queries: Queries, topk: int) -> Tensor:
    """Select keys for each query, one chunk of queries at a time, and return the same indices as `selected`.

    Args:
        chunks: Chunks that cover all queries.
        index: Operands of the indexer scores.
        queries: Positions of the keys that the queries may attend to.
        topk: Number of keys to select for each query.
    """
    n, b = index.q.shape[:2]
    picked = torch.full((n, b, topk), -1, dtype=torch.int32, device=index.q.device)
    for chunk in queries.hardware.each(chunks):
        if chunk.keys > topk:
            scores = scores_of_keys(index.q[chunk.rows], index.k[: chunk.keys], index.weights[chunk.rows])
            first, last = (bound[chunk.rows] for bound in (queries.first, queries.last))
            picked[chunk.rows] = largest_scores(scores, first, last, topk)
        else:
            every = torch.arange(chunk.keys, dtype=torch.int32, device=picked.device)
            picked[chunk.rows, :, : chunk.keys] = every.expand(chunk.rows.stop - chunk.rows.start, b, -1).masked_fill(
                queries.hidden(chunk), -1
            )
    return picked


@torch.no_grad()
def selected(index: Index, queries: Queries, topk: int) -> Tensor:
    """Return the indices [n, b, topk] of the keys that each query attends to, as int32, in ascending order and padded
    with -1."""
    return keys_of_chunks(index, queries, topk)
