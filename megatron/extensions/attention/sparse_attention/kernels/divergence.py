"""Triton kernels that compute the indexer loss over selected keys and the gradients of this loss. The kernels replace
the function `divergence` on GPUs.

The kernels multiply each query only by its selected keys. In contrast, the plain PyTorch implementation multiplies a
chunk of queries by all keys, and stores the products of all indexer heads.

Key gradients are either accumulated in fp32 by atomic additions, whose order is arbitrary, or summed by a second kernel
in a fixed order. For the second kernel, the first kernel stores the fp32 score gradients [rows, b, keys] of a chunk of
queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from inspect import unwrap

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce_
from megatron.core.parallel_state import Axis
from megatron.core.transformer.recompute import again
from megatron.extensions.attention.sparse_attention.flags import SparseAttentionFlags
from megatron.extensions.attention.sparse_attention.indexer_loss import Loss, divergence
from megatron.extensions.attention.sparse_attention.kernels import attention
from megatron.extensions.attention.sparse_attention.kernels.selection import WIDEST
from megatron.extensions.attention.sparse_attention.selected_attention import Keys, Rows
from megatron.extensions.attention.sparse_attention.selection import Chunk, Index, merged
from megatron.extensions.speed.fusions.kernel_choice import FusedKernel, RunShapes, gpu_operator, runs_triton

KEYS, PARTS = 128, 4
"""Block sizes that the planner assumes. KEYS is the number of keys per Triton program of the second kernel. PARTS is
the number of programs among which the queries are divided."""

MOST_HEADS = 64
"""Largest number of indexer heads that the kernels support."""

SLOW_ADDITIONS = 150
"""Cost of atomic fp32 additions relative to matrix products: the number of matrix product FLOPs that an H200 computes
in the time that it needs to add one byte atomically. The rates of both operations are assumptions from
`plan/planner/devices/h200.yaml`, not measurements."""


def fits(index: Index, loss: Loss) -> bool:
    """Return True if the kernels support the given operands. The kernels require that `loss.picked` and `loss.lse` are
    not None."""
    listed = loss.picked is not None and loss.lse is not None
    narrow = index.q.shape[-1] <= WIDEST and index.q.shape[2] <= MOST_HEADS
    half = index.q.dtype in (torch.float16, torch.bfloat16) and index.q.dtype == index.weights.dtype
    return listed and narrow and half and attention.fits(loss.q, min(loss.q.shape[-1], attention.WIDEST_VALUES))


def sums_later(keys: int, count: int, heads: int) -> bool:
    """Return True if summing key gradients in a second pass over all query-key pairs is faster than atomic additions.
    The second pass computes 4 FLOPs per pair, head and channel. Atomic additions add 4 bytes per selected key and
    channel."""
    return count * SLOW_ADDITIONS >= keys * heads


def loss_chunks(loss: Loss, samples: int) -> tuple[Chunk, ...]:
    """Return the chunks of queries for which the loss is computed. Adjacent chunks are merged if the same rank computes
    their loss."""
    size = len(loss.own)
    shards = (loss.queries.chunks[0].rows.start, len(loss.q))
    found = list[Chunk]()
    for start in range(*shards, size):
        own = [chunk for chunk in loss.queries.chunks if start <= chunk.rows.start < start + size]
        found += merged(own, samples)
    return tuple(found)


def by_kernels(index: Index, loss: Loss) -> tuple[Tensor, Index]:
    """Triton implementation of `divergence`, with the same arguments and results."""
    assert loss.picked is not None and loss.lse is not None
    q, k, weights = (x.contiguous() for x in index)
    keys_of_attention, count = loss.k.contiguous(), loss.picked.shape[-1]
    adds = attention.adds_gradients(q.device, len(k), 0) and not sums_later(len(k), count, q.shape[2])
    total, found = _results(Index(q, k, weights))
    for chunk in loss.queries.hardware.each(loss_chunks(loss, q.shape[1])):
        picked = loss.picked[chunk.rows].contiguous()
        with again():
            attended = attention.listed_weights(
                loss.q[chunk.rows], keys_of_attention, picked, loss.lse[chunk.rows], loss.scale
            )
        attended = all_reduce_(attended, loss.heads)
        if chunk.rows.start not in loss.own:
            continue
        mine = chunk.moved(loss.own.start).rows
        of_rows = _gradients(q[mine], k, weights[mine], picked, attended, chunk.keys, adds)
        sums, found.q[mine], found.weights[mine], of_keys = of_rows
        total += sums.sum(dtype=torch.float64)
        found.k[: chunk.keys] += of_keys
    return total, found._replace(k=found.k.to(k.dtype))


def _results(index: Index) -> tuple[Tensor, Index]:
    """Allocate the results of the loss computation: the loss and the gradients of the operands. The loss and the fp32
    key gradients are initialized to zero. The other gradients are uninitialized."""
    of_keys = torch.zeros(index.k.shape, dtype=torch.float32, device=index.k.device)
    found = Index(torch.empty_like(index.q), of_keys, torch.empty_like(index.weights))
    return torch.zeros((), dtype=torch.float64, device=index.k.device), found


def _fake_gradients(
    q: Tensor, k: Tensor, weights: Tensor, picked: Tensor, attended: Tensor, keys: int, adds: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums, of_keys = (q.new_empty(shape, dtype=torch.float32) for shape in (q.shape[:2], (keys, *k.shape[1:])))
    return sums, torch.empty_like(q), torch.empty_like(weights), of_keys


_gradients = gpu_operator(
    "divergence_triton:gradients_of_listed",
    "(Tensor q, Tensor k, Tensor weights, Tensor picked, Tensor attended, int keys, bool adds) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_gradients,
    __package__,
)
"""Operator that returns the loss of each query [n, b], the gradients of `q` and of `weights`, and the fp32 gradients of
the first `keys` rows of `k`. `attended` [n, b, count] contains the attention weights of the keys in `picked`, summed
over heads. If `adds` is True, key gradients are accumulated by atomic additions; otherwise, a second kernel sums
them."""


def planned(launches: attention.Gathers, index: Index, loss: Loss) -> tuple[Tensor, Index]:
    """Simulate `by_kernels` for the planner: allocate the same tensors, and record the kernels in `launches` instead of
    launching them. The GPU is assumed to support vectorized atomic additions."""
    if not fits(index, loss):
        return unwrap(divergence)(index, loss)
    assert loss.picked is not None
    b, count = index.q.shape[1], loss.picked.shape[-1]
    adds = launches.any_order and not sums_later(len(index.k), count, index.q.shape[2])
    total, found = _results(index)
    for chunk in loss.queries.hardware.each(loss_chunks(loss, b)):
        rows = chunk.rows.stop - chunk.rows.start
        pairs = float(rows * b * min(count, max(chunk.keys // 2, chunk.keys - rows // 2)))
        attended = attention.planned_listed_weights(launches, loss.q[chunk.rows], loss.picked[chunk.rows], pairs)
        attended = all_reduce_(attended, loss.heads)
        if chunk.rows.start in loss.own:
            mine = chunk.moved(loss.own.start).rows
            found.k[: chunk.keys] += _planned_gradients(launches, index, mine, chunk.keys, pairs, adds)
    return total, found._replace(k=found.k.to(index.k.dtype))


def _planned_gradients(
    launches: attention.Gathers, index: Index, rows: slice, keys: int, pairs: float, adds: bool
) -> Tensor:
    """Record the kernels that compute the gradients: one kernel if `adds` is True, and two kernels otherwise. Return a
    tensor with the shape of the key gradients."""
    q, k = index.q[rows], index.k
    heads, width = q.shape[2:]
    channels, read = float(heads * width), 2 * pairs * width * q.element_size()
    if adds:
        launches.gathered(8 * pairs * channels, read, 4 * pairs * width)
        return torch.zeros(keys, *k.shape[1:], dtype=torch.float32, device=k.device)
    dense = torch.zeros(*q.shape[:2], keys, dtype=torch.float32, device=k.device)
    launches.gathered(6 * pairs * channels, read)
    of_queries = channels * q.element_size() / KEYS
    launches.gathered(4 * dense.numel() * channels, dense.numel() * (4 + of_queries))
    return torch.empty(PARTS, keys, *k.shape[1:], dtype=torch.float32, device=k.device).sum(0)


def samples(shapes: RunShapes) -> Iterator[tuple[Index, Loss]]:
    """Yield test arguments for `divergence`, computed from each item of `attention.samples` that has selected keys."""
    if shapes.config is None:
        return
    own = shapes.config.options(SparseAttentionFlags)
    heads, width = own.dsa_indexer_n_heads, own.dsa_indexer_head_dim
    for q, _, seen, k, scale, _, _ in attention.samples(shapes):
        queries, picked = seen[-1]
        if picked is None:
            continue
        (n, b), sets = q.shape[:2], zip(seen, k, strict=True)
        lse = reduce(torch.logaddexp, (_log_sums(q, each, keys, scale) for each, keys in sets))
        beside = None if len(seen) == 1 else _log_sums(q, seen[0], k[0], scale)
        of_heads = shapes.random(n, b, heads) * (heads * width) ** -0.5
        index = Index(shapes.random(n, b, heads, width), shapes.random(len(k[-1]), b, width), of_heads)
        yield index, Loss(q, k[-1], picked, queries, scale, Axis(), range(n), beside, lse)


def _log_sums(q: Tensor, seen: Keys, k: Tensor, scale: float) -> Tensor:
    """Return the log-sum-exps [n, b, h] of the attention scores for one key set."""
    chunks = seen.queries.chunks
    return torch.cat([Rows(q, k, seen.queries, chunk, seen.picked).scores(scale).logsumexp(-1) for chunk in chunks])


DIVERGENCE = FusedKernel(
    by_kernels,
    divergence,
    lambda index, loss: runs_triton(index.q) and fits(index, loss),
    samples,
    attention.TOLERANCE,
    planned,
)
