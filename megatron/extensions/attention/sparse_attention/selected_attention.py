"""Computation of attention to selected keys in chunks of queries.

All heads share one key per token. The value of a token is not stored separately: it consists of the first channels of
the key, as in the form of multi-latent attention that attends to latents directly. One softmax may cover several key
sets, such as the token keys and the compressed keys of DeepSeek-V4.

GPU kernels (`kernels/attention.py`) replace the forward and backward passes where the kernels are faster. In tensor
shapes, n, b, s and h are the numbers of queries, samples, keys and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.attention.varlen import sinks_grad
from megatron.core.compiled_regions import torch_function
from megatron.core.kernels import operation
from megatron.core.tensor_parallel.layers import Hardware
from megatron.core.tensor_parallel.weight_grad import add_rows_
from megatron.core.torch_private import AutogradContext
from megatron.core.transformer.recompute import again
from megatron.extensions.attention.sparse_attention.selection import Chunk, Queries


class Rows:
    """Chunk of queries together with the keys that they attend to. These keys are either selected for each query or are
    all keys in a range of positions."""

    def __init__(self, q: Tensor, k: Tensor, queries: Queries, chunk: Chunk, picked: Tensor | None) -> None:
        """Slice the queries of a chunk, and locate the keys that these queries attend to.

        Args:
            q: [n, b, h, w], all queries.
            k: [s, b, w], all keys.
            queries: Positions of the keys that the queries may attend to.
            chunk: Chunk of queries to slice.
            picked: [n, b, topk], indices of the selected keys, padded with -1; None if queries attend to all keys in
                their range.
        """
        self.rows = chunk.rows
        self.q = q[chunk.rows]
        self.all_keys, self.samples = k, k.shape[1]
        self.keys = slice(chunk.first, chunk.keys)
        self.flat: Tensor | None = None
        self.picked: Tensor | None = None
        if picked is None or chunk.keys <= picked.shape[-1]:
            self.hidden = queries.hidden(chunk)
        else:
            self.picked = picked[chunk.rows].long()
            sample = torch.arange(self.samples, device=k.device)[:, None]
            self.flat = self.picked.clamp(min=0) * self.samples + sample
            self.hidden = self.picked < 0

    @cached_property
    def k(self) -> Tensor:
        """All keys [keys, b, w] in the range of the chunk, or the selected keys [rows, b, topk, w] of each query."""
        return self.all_keys[self.keys] if self.flat is None else self.all_keys.flatten(0, 1)[self.flat]

    def scores(self, scale: float) -> Tensor:
        """Return the attention scores in fp32 or fp64: [rows, b, h, keys], or [rows, b, h, topk] if keys were selected.
        The score is -infinity if a query may not attend to the key."""
        q = self.q * scale
        wide = torch.promote_types(q.dtype, torch.float32)
        return self.with_keys(q, self.k).to(wide).masked_fill_(self.hidden.unsqueeze(2), -torch.inf)

    def with_keys(self, x: Tensor, keys: Tensor) -> Tensor:
        """Return the dot products of x [rows, b, h, w] and `keys`. The dot products are [rows, b, h, keys], or [rows,
        b, h, topk] if keys were selected. The last dimension of `keys` is w."""
        return x @ keys.mT if self.flat is not None else self._by_sample(x, keys.permute(1, 2, 0))

    def of_keys(self, weights: Tensor, keys: Tensor) -> Tensor:
        """Return the sums [rows, b, h, w] of `keys`, weighted by `weights`. The weights are [rows, b, h, keys], or
        [rows, b, h, topk] if keys were selected. The last dimension of `keys` is w."""
        return weights @ keys if self.flat is not None else self._by_sample(weights, keys.transpose(0, 1))

    def add_to_keys_(self, out: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add weighted sums of `rows` [rows, b, h, w] to `out` [s, b, w]. For each key, the sum over rows and heads,
        weighted with the key's weights, is added to the key's row of `out`. The weights are [rows, b, h, keys], or
        [rows, b, h, topk] if keys were selected."""
        if self.flat is not None:
            add_rows_(out.flatten(0, 1), self.flat.flatten(), (weights.mT @ rows).flatten(0, 2))
        else:
            both = (x.transpose(0, 1).flatten(1, 2) for x in (weights, rows))
            out[self.keys] += (next(both).mT @ next(both)).transpose(0, 1)

    def distribution(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Expand attention weights to all keys. If keys were selected, the weights are [rows, b, topk], and are
        scattered to [rows, b, keys]; otherwise, they already are [rows, b, keys]. Also return a mask [rows, b, keys]
        that is True for keys to which a query does not attend."""
        if self.flat is None:
            return weights, self.hidden
        assert self.picked is not None
        shape, at = (*weights.shape[:2], self.keys.stop), self.picked.clamp(min=0)
        seen = weights.new_zeros(shape).scatter_add_(-1, at, (self.picked >= 0).to(weights.dtype))
        return weights.new_zeros(shape).scatter_add_(-1, at, weights), seen == 0

    def _by_sample(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Multiply x [rows, b, h, w] by one matrix per sample, `matrices` [b, w, v]. Return the products [rows, b, h,
        v]."""
        x = x.transpose(0, 1)
        return (x.flatten(1, 2) @ matrices).unflatten(1, x.shape[1:3]).transpose(0, 1)


class Keys(NamedTuple):
    """The keys that each query attends to in one key set. A key set is a tensor of keys, such as the token keys or the
    compressed keys. `queries` contains the first and the last key that each query may attend to. If keys are selected,
    `picked` contains the indices of the selected keys."""

    queries: Queries
    picked: Tensor | None = None
    """[n, b, topk], indices of the selected keys, padded with -1; None if queries attend to all keys in their range."""


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class Attended(NamedTuple):
    """Attention outputs and log-sum-exps for a rank's queries."""

    out: Tensor
    """Attention outputs [n, b, h, width]."""
    lse: Tensor
    """Log-sum-exps [n, b, h] of all scores and sinks, as fp32 for 16-bit inputs."""
    of_first: Tensor
    """Log-sum-exps [n, b, h] of the sinks and of the scores in the first key set."""
    highest: Tensor | None
    """Largest score [h] of each head; None if the scores were not requested."""


@operation
@torch_function
def attend_to_selected(
    q: Tensor,
    sinks: Tensor | None,
    seen: tuple[Keys, ...],
    k: tuple[Tensor, ...],
    scale: float,
    width: int,
    notes: bool,
) -> Attended:
    """Compute attention to selected keys.

    Args:
        q: [n, b, h, w], queries.
        sinks: [h], logits of attention sinks; None if there are no sinks.
        seen: Key sets that the queries attend to.
        k: Keys [s, b, w] of each set.
        scale: Factor by which scores are multiplied.
        width: Number of value channels, which are the first channels of a key.
        notes: Whether to return the largest score of each head.
    """
    out = q.new_empty(*q.shape[:3], width)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    of_first, highest = torch.empty_like(lse), None
    for parts in _parts(q, k, seen):
        found, at = [rows.scores(scale) for rows in parts], parts[0].rows
        scores = joined(found)
        if notes:
            top = scores.amax((0, 1, 3))
            highest = top if highest is None else torch.maximum(highest, top)
        of_first[at] = found[0].logsumexp(-1)
        lse[at] = of_first[at] if len(found) == 1 else scores.logsumexp(-1)
        if sinks is not None:
            for each in (of_first, lse):
                each[at] = torch.logaddexp(each[at], sinks.to(lse.dtype))
        weights = scores.sub_(lse[at].unsqueeze(-1)).exp_().to(q.dtype).split([x.shape[-1] for x in found], -1)
        pairs = zip(parts, weights, strict=True)
        out[at] = reduce(add, [rows.of_keys(of_rows, rows.k[..., :width]) for rows, of_rows in pairs])
    return Attended(out, lse, of_first, highest)


@operation
@torch_function
def selected_attention_gradients(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: tuple[Keys, ...],
    k: tuple[Tensor, ...],
    scale: float,
    width: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of q and of the keys in each key set. The key gradients have the dtype of `lse`.

    For attention weights P, score gradients are dS = P * (dO vᵀ - rowsum(dO * O)), and value gradients are dV = Pᵀ dO.

    Args:
        grad: [n, b, h, width], output gradients.
        q: [n, b, h, w], queries.
        out: [n, b, h, width], outputs.
        lse: [n, b, h], log-sum-exps of all scores and sinks.
        seen: Key sets.
        k: Keys [s, b, w] of each set.
        scale: Factor by which scores are multiplied.
        width: Number of value channels, which are the first channels of a key.
    """
    dq, dk = torch.empty_like(q), [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in k]
    for parts in _parts(q, k, seen):
        at = parts[0].rows
        do, of_rows = grad[at], lse[at].unsqueeze(-1)
        delta = (do.to(lse.dtype) * out[at].to(lse.dtype)).sum(-1, keepdim=True)
        values = torch.zeros_like(parts[0].q)
        values[..., :width] = do
        into, total = torch.cat((parts[0].q, values), dim=2), torch.zeros_like(parts[0].q)
        for rows, of_keys in zip(parts, dk, strict=True):
            with again():
                weights = rows.scores(scale).sub_(of_rows).exp_()
            ds = rows.with_keys(do, rows.k[..., :width]).to(lse.dtype).sub_(delta)
            ds = ds.mul_(weights).mul_(scale).to(q.dtype)
            total += rows.of_keys(ds, rows.k)
            rows.add_to_keys_(of_keys, torch.cat((ds, weights.to(q.dtype)), dim=2), into)
        dq[at] = total
    return dq, *dk


@operation
@torch_function
def attended_weights(q: Tensor, rows: Rows, scale: float, beside: Tensor | None, lse: Tensor | None) -> Tensor:
    """Return the attention weights, summed over heads: [rows, b, keys], or [rows, b, topk] if keys were selected.

    Args:
        q: [rows, b, h, w], queries of `rows`.
        rows: Chunk of queries and its keys.
        scale: Factor by which scores are multiplied.
        beside: [rows, b, h], log-sum-exps of the scores of sinks and of attended keys outside `rows`; None if there are
            no such keys or sinks.
        lse: [rows, b, h], log-sum-exps of all scores and sinks, if known. Only the Triton implementation uses `lse`.
    """
    scores = rows.scores(scale)
    total = scores.logsumexp(-1)
    total = total if beside is None else torch.logaddexp(total, beside)
    return scores.sub_(total.unsqueeze(-1)).exp_().sum(2).contiguous()


class SelectedContext(AutogradContext):
    settings: tuple[list[tuple[tuple[Chunk, ...], Hardware, int]], float, int]


class AttentionToSelected(torch.autograd.Function):
    """Autograd function of `attend_to_selected`. The function returns the outputs, the log-sum-exps over all key sets,
    and the log-sum-exps over the first key set. The operands, outputs and log-sum-exps are saved for the backward pass.
    If `note` is not None, it is called with the largest score [h] of each head."""

    @staticmethod
    def forward(
        ctx: SelectedContext,
        q: Tensor,
        sinks: Tensor | None,
        seen: tuple[Keys, ...],
        scale: float,
        width: int,
        note: Callable[[Tensor], None] | None,
        *k: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = attend_to_selected(q, sinks, seen, k, scale, width, note is not None)
        if note is not None and found.highest is not None:
            note(found.highest)
        picked, bounds = [each.picked for each in seen], [x for each in seen for x in each.queries[:2]]
        ctx.save_for_backward(q, sinks, found.out, found.lse, *k, *picked, *bounds)
        ctx.settings = [each.queries[2:] for each in seen], scale, width
        ctx.mark_non_differentiable(found.lse, found.of_first)
        return found.out, found.lse, found.of_first.view_as(found.of_first)

    @staticmethod
    @once_differentiable
    def backward(ctx: SelectedContext, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (q, sinks, out, lse, *more), (loops, scale, width) = ctx.saved_tensors, ctx.settings
        count = len(loops)
        k = tuple(more[:count])
        picked = more[count : 2 * count]
        bounds = more[2 * count :]
        queries = [Queries(bounds[2 * at], bounds[2 * at + 1], *loop) for at, loop in enumerate(loops)]
        seen = tuple(map(Keys, queries, picked))
        dq, *dk = selected_attention_gradients(grad, q, out, lse, seen, k, scale, width)
        of_sinks = None if sinks is None else sinks_grad(grad, out, lse, sinks)
        return dq, of_sinks, None, None, None, None, *(of.to(x.dtype) for of, x in zip(dk, k, strict=True))


def _parts(q: Tensor, k: Sequence[Tensor], seen: tuple[Keys, ...]) -> Iterator[list[Rows]]:
    """For each chunk of queries, yield a list with one `Rows` per key set."""
    hardware, of_sets = seen[0].queries.hardware, list(zip(*(each.queries.chunks for each in seen), strict=True))
    for chunks in hardware.each(of_sets):
        sets = zip(k, seen, chunks, strict=True)
        yield [Rows(q, x, each.queries, chunk, each.picked) for x, each, chunk in sets]
