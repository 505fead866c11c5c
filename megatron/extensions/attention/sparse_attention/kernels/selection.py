"""Triton kernels that select keys. The kernels replace the functions `scores_of_keys` and `largest_scores` on GPUs.

The kernels do not store the products of individual heads, and do not sort the scores. The scores of the kernels differ
from the scores of plain PyTorch only by rounding: plain PyTorch rounds products of 16-bit operands to 16 bits. Among
keys with equal scores, both the kernels and plain PyTorch select the later keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from inspect import unwrap
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.kernels import kernel_for
from megatron.extensions.attention.sparse_attention.flags import SparseAttentionFlags, sparse_shapes
from megatron.extensions.attention.sparse_attention.selection import (
    Index,
    Queries,
    keys_of_chunks,
    largest_scores,
    merged,
    scores_of_keys,
    selected_in,
)
from megatron.extensions.speed.fusions.kernel_choice import FusedKernel, RunShapes, gpu_operator, runs_triton

WIDEST, SAMPLED = 128, 64
"""WIDEST is the largest number of channels per indexer head that the kernel supports. SAMPLED is the number of queries
in the test inputs with which the kernels are compared with plain PyTorch."""


def fits(q: Tensor) -> bool:
    """Return True if the score kernel supports the queries q [n, b, heads, d]."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= WIDEST and q.numel() > 0


def scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Triton implementation of `scores_of_keys`, with the same arguments and result."""
    return _scores(q.contiguous(), k.contiguous(), weights.contiguous())


def largest(found: Tensor, first: Tensor, last: Tensor, topk: int) -> Tensor:
    """Triton implementation of `largest_scores`, with the same arguments and result."""
    begin, end = torch.broadcast_tensors(first, last)
    return _largest(found.contiguous(), begin.contiguous(), end.contiguous(), topk)


def keys(index: Index, queries: Queries, topk: int) -> Tensor:
    """Triton implementation of `keys_of_chunks`, with the same arguments and result. The kernels need little memory per
    query, so adjacent chunks are merged."""
    return selected_in(merged(queries.chunks, index.q.shape[1]), index, queries, topk)


def _fake_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k.shape[0], dtype=torch.float32)


def _fake_largest(scores: Tensor, first: Tensor, last: Tensor, topk: int) -> Tensor:
    return scores.new_empty(scores.shape[0], scores.shape[1], topk, dtype=torch.int32)


_scores = gpu_operator(
    "selection_triton:scores_of_keys", "(Tensor q, Tensor k, Tensor weights) -> Tensor", _fake_scores, __package__
)
_largest = gpu_operator(
    "selection_triton:largest_scores",
    "(Tensor scores, Tensor first, Tensor last, int topk) -> Tensor",
    _fake_largest,
    __package__,
)


class Multiplies(Protocol):
    """Part of the planner's interface `Launches`: a method that records a matrix product, and a context manager within
    which operators are not recorded."""

    def product(self, name: str, a: Tensor, b: Tensor, out: Tensor, options: dict[str, object]) -> None: ...

    def unseen(self) -> AbstractContextManager[None]: ...


def planned_scores(launches: Multiplies, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Simulate `scores` for the planner: allocate the same tensors, and record the kernel in `launches` instead of
    launching it. The arguments after `launches` are the arguments of `scores`."""
    if not fits(q):
        return unwrap(scores_of_keys)(q, k, weights)
    out = _fake_scores(q, k, weights)
    with launches.unseen():
        a, b = q.transpose(0, 1).flatten(1, 2), k.permute(1, 2, 0)
    launches.product("bmm", a, b, out, {})
    return out


def planned_largest(launches: Multiplies, found: Tensor, first: Tensor, last: Tensor, topk: int) -> Tensor:
    """Simulate `largest` for the planner: allocate the same tensors, and record the memory reads of the kernel instead
    of launching it. The arguments after `launches` are the arguments of `largest`. The kernel reads each row of scores
    several times, but only the first two reads are counted, because later reads hit the cache."""
    if found.dtype != torch.float32:
        return unwrap(largest_scores)(found, first, last, topk)
    for _ in range(2):
        found.amax(-1)
    return torch.full((*found.shape[:2], topk), -1, dtype=torch.int32)


def planned_keys(launches: Multiplies, index: Index, queries: Queries, topk: int) -> Tensor:
    """Simulate `keys` for the planner: allocate the same tensors, and record the kernels in `launches` instead of
    launching them. The arguments after `launches` are the arguments of `keys`."""
    return keys(index, queries, topk) if fits(index.q) else unwrap(keys_of_chunks)(index, queries, topk)


def _score_samples(shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield test arguments for `scores_of_keys`, one set for each kind of layer with an indexer."""
    if shapes.config is None:
        return
    own = shapes.config.options(SparseAttentionFlags)
    heads, width = own.dsa_indexer_n_heads, own.dsa_indexer_head_dim
    for keys in (each for shape in sparse_shapes(shapes.config) for each in shape.sets if each.selects):
        q, k = shapes.random(SAMPLED, 1, heads, width), shapes.random(shapes.config.model.seq_length, 1, width)
        yield q, k[: len(k) // keys.tokens], shapes.random(SAMPLED, 1, heads)


def _largest_samples(shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Yield test arguments for `largest_scores` in which many scores are equal."""
    for q, k, _ in _score_samples(shapes):
        assert shapes.config is not None
        topk = min(len(k), shapes.config.options(SparseAttentionFlags).dsa_indexer_topk)
        found = shapes.random(len(q), 1, len(k), dtype=torch.float32).mul_(1000).round_()
        last = torch.arange(len(k) - len(q), len(k), device=shapes.device)[:, None].clamp_(min=0)
        yield found, torch.zeros_like(last), last, topk


SCORES = FusedKernel(
    scores, scores_of_keys, lambda q, *_: runs_triton(q) and fits(q), _score_samples, 2.0**-6, planned_scores
)
LARGEST = FusedKernel(
    largest,
    largest_scores,
    lambda found, *_: runs_triton(found) and found.dtype == torch.float32,
    _largest_samples,
    0.0,
    planned_largest,
)
KEYS = FusedKernel(
    keys,
    keys_of_chunks,
    lambda index, *_: kernel_for("scores_of_keys", *index) is not None,
    lambda shapes: (),  # no test inputs here: the entries SCORES and LARGEST test the two kernels that `keys` launches
    0.0,
    planned_keys,
)
