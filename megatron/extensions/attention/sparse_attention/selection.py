"""Selection of keys by an indexer, attention to the selected keys, and the indexer's loss, in chunks of queries.

DeepSeek-V3.2 (arXiv 2512.02556), section 2.1. With queries q of the indexer's heads h, one key k per token, and weights
w per head, the score of token j for the query of token i is the sum over h of w_ih ReLU(q_ih · k_j) (equation 1).
Attention is that of one key group whose values are the first channels of its keys, as in the form of multi-latent
attention that attends to latents. The loss of a token is KL(p, softmax(scores)), p being the mean over heads of
attention's weights, over the selected keys or over all that the query could see (equations 3 and 4).

Keys may be of several sets that share a softmax, as those of tokens and compressed ones of DeepSeek-V4. Then p is the
part of attention's weights that selected keys have, divided by its sum.

No more than a chunk of scores is in memory. Shapes: n queries of b samples, s keys, h heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.attention.tiles import Spans
from megatron.core.attention.varlen import sinks_grad
from megatron.core.collectives import all_reduce_
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import Hardware
from megatron.core.tensor_parallel.weight_grad import add_rows_
from megatron.core.torch_private import AutogradContext
from megatron.core.transformer.recompute import again

CHUNK = 2**27
"""Elements of the largest tensor of a chunk of queries."""


class Chunk(NamedTuple):
    """Queries that are computed together."""

    rows: slice
    keys: int
    """Keys that some of them see: all before this position."""
    first: int = 0
    """The keys from this position on."""

    def moved(self, start: int) -> Chunk:
        """The same queries, their rows counted from `start`."""
        return self._replace(rows=slice(self.rows.start - start, self.rows.stop - start))


class Queries(NamedTuple):
    """Positions of the keys that queries could see, [n, 1 or b] int64, and the chunks that they are computed in."""

    first: Tensor
    last: Tensor
    chunks: tuple[Chunk, ...]
    hardware: Hardware

    def hidden(self, chunk: Chunk) -> Tensor:
        """[rows, 1 or b, keys] bool, true where a query could not see the key."""
        keys = torch.arange(chunk.first, chunk.keys, device=self.last.device)
        return (keys > self.last[chunk.rows, :, None]) | (keys < self.first[chunk.rows, :, None])


class Index(NamedTuple):
    """Operands of the indexer's scores."""

    q: Tensor
    """[n, b, indexer heads, d]"""
    k: Tensor
    """[s, b, d]"""
    weights: Tensor
    """[n, b, indexer heads]"""


def chunks_of(spans: Spans, shards: int, longest: int, keys: int | None = None) -> tuple[Chunk, ...]:
    """Chunks of at most `longest` queries at the positions `spans`, each within one of equal shards of the rows. Of
    queries behind earlier tokens `keys` are the tokens that there are."""
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


def index_products(index: Index, chunk: Chunk) -> Tensor:
    """ReLU(q · k) [b, rows, indexer heads, keys], in fp32 for 16 bits"""
    q = index.q[chunk.rows].transpose(0, 1)
    products = (q.flatten(1, 2) @ index.k[: chunk.keys].permute(1, 2, 0)).unflatten(1, q.shape[1:3])
    return products.to(torch.promote_types(q.dtype, torch.float32)).relu_()


def index_scores(index: Index, chunk: Chunk, products: Tensor) -> Tensor:
    """[rows, b, keys]"""
    weights = index.weights[chunk.rows].transpose(0, 1).to(products.dtype)
    return (weights.unsqueeze(2) @ products).squeeze(2).transpose(0, 1)


def largest(scores: Tensor, topk: int) -> Tensor:
    """scores [rows, b, keys] -> [rows, b, topk] int32: the keys with the largest scores in ascending order, the later
    ones of equal scores. -1 for those with a score of -inf. ReLU makes many scores equal: the choice must not depend on
    how queries are divided."""
    least = scores.topk(topk, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    wanted = topk - above.sum(-1, keepdim=True)
    latest = equal.flip(-1).cumsum(-1).flip(-1) <= wanted
    keys, last = torch.arange(scores.shape[-1], device=scores.device), scores.shape[-1] - 1
    chosen = torch.where(above | (equal & latest), keys, last + 1).topk(topk, largest=False, sorted=True).values
    chosen = chosen.clamp_(max=last)  # where a score is NaN, fewer are chosen
    return chosen.masked_fill_(scores.gather(-1, chosen) == -torch.inf, -1).to(torch.int32)


@torch.no_grad()
def selected(index: Index, queries: Queries, topk: int) -> Tensor:
    """[n, b, topk] int32: the keys that each query sees; -1 where it could see fewer. Rows of chunks whose queries see
    all keys mean nothing."""
    n, b = index.q.shape[:2]
    picked = torch.full((n, b, topk), -1, dtype=torch.int32, device=index.q.device)
    for chunk in queries.hardware.each(queries.chunks):
        if chunk.keys > topk:
            scores = index_scores(index, chunk, index_products(index, chunk))
            picked[chunk.rows] = largest(scores.masked_fill(queries.hidden(chunk), -torch.inf), topk)
    return picked


class Rows:
    """A chunk of queries with the keys that they attend to: those selected for each, or all before a position."""

    def __init__(self, q: Tensor, k: Tensor, queries: Queries, chunk: Chunk, picked: Tensor | None) -> None:
        """q [n, b, h, w], k [s, b, w], picked [n, b, topk] or None for all keys"""
        self.rows = chunk.rows
        self.q = q[chunk.rows]
        self.samples = k.shape[1]
        self.keys, self.flat = slice(chunk.first, chunk.keys), None
        if picked is None or chunk.keys <= picked.shape[-1]:
            self.k, self.hidden = k[self.keys], queries.hidden(chunk)
        else:
            self.picked = picked[chunk.rows].long()
            sample = torch.arange(self.samples, device=k.device)[:, None]
            self.flat = self.picked.clamp(min=0) * self.samples + sample
            self.k, self.hidden = k.flatten(0, 1)[self.flat], self.picked < 0  # [rows, b, topk, w]

    def scores(self, scale: float) -> Tensor:
        """[rows, b, h, keys or topk] in fp32 or fp64"""
        q = self.q * scale
        wide = torch.promote_types(q.dtype, torch.float32)
        return self.with_keys(q, self.k).to(wide).masked_fill_(self.hidden.unsqueeze(2), -torch.inf)

    def with_keys(self, x: Tensor, keys: Tensor) -> Tensor:
        """x [rows, b, h, w] times keys [..., w] -> [rows, b, h, keys or topk]"""
        return x @ keys.mT if self.flat is not None else self._by_sample(x, keys.permute(1, 2, 0))

    def of_keys(self, weights: Tensor, keys: Tensor) -> Tensor:
        """weights [rows, b, h, keys or topk] times keys [..., w] -> [rows, b, h, w]"""
        return weights @ keys if self.flat is not None else self._by_sample(weights, keys.transpose(0, 1))

    def add_to_keys_(self, out: Tensor, weights: Tensor, rows: Tensor) -> None:
        """out [s, b, w] += weights [rows, b, h, keys or topk] times rows [rows, b, h, w], by key."""
        if self.flat is not None:
            add_rows_(out.flatten(0, 1), self.flat.flatten(), (weights.mT @ rows).flatten(0, 2))
        else:
            both = (x.transpose(0, 1).flatten(1, 2) for x in (weights, rows))
            out[self.keys] += (next(both).mT @ next(both)).transpose(0, 1)

    def distribution(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """weights [rows, b, keys or topk] of what is attended to -> [rows, b, keys], and which keys are not."""
        if self.flat is None:
            return weights, self.hidden
        shape, at = (*weights.shape[:2], self.keys.stop), self.picked.clamp(min=0)
        seen = weights.new_zeros(shape).scatter_add_(-1, at, (self.picked >= 0).to(weights.dtype))
        return weights.new_zeros(shape).scatter_add_(-1, at, weights), seen == 0

    def _by_sample(self, x: Tensor, matrices: Tensor) -> Tensor:
        """x [rows, b, h, w], matrices [b, w, v] -> [rows, b, h, v]"""
        x = x.transpose(0, 1)
        return (x.flatten(1, 2) @ matrices).unflatten(1, x.shape[1:3]).transpose(0, 1)


class Keys(NamedTuple):
    """How queries see a set of keys."""

    queries: Queries
    picked: Tensor | None = None
    """[n, b, topk]; None for all keys."""


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class SelectedContext(AutogradContext):
    settings: tuple[list[tuple[tuple[Chunk, ...], Hardware]], float, int]


class AttentionToSelected(torch.autograd.Function):
    """q [n, b, h, w], sinks [h] or None, a set of keys [s, b, w] for each of `seen`, whose first `width` channels are
    values -> [n, b, h, width], and the log-sum-exps [n, b, h] of the scores of the first set and sinks. Saved are
    operands, outputs and log-sum-exps. `note` is called with the largest scores [h]."""

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
    ) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:3], width)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        of_first = torch.empty_like(lse)
        for parts in _parts(q, k, seen):
            found, at = [rows.scores(scale) for rows in parts], parts[0].rows
            scores = joined(found)
            if note is not None:
                note(scores.amax((0, 1, 3)))
            of_first[at] = found[0].logsumexp(-1)
            lse[at] = of_first[at] if len(found) == 1 else scores.logsumexp(-1)
            if sinks is not None:
                for each in (of_first, lse):
                    each[at] = torch.logaddexp(each[at], sinks.to(lse.dtype))
            weights = scores.sub_(lse[at].unsqueeze(-1)).exp_().to(q.dtype).split([x.shape[-1] for x in found], -1)
            pairs = zip(parts, weights, strict=True)
            out[at] = reduce(add, [rows.of_keys(of_rows, rows.k[..., :width]) for rows, of_rows in pairs])
        picked, bounds = [each.picked for each in seen], [x for each in seen for x in each.queries[:2]]
        ctx.save_for_backward(q, sinks, out, lse, *k, *picked, *bounds)
        ctx.settings = [each.queries[2:] for each in seen], scale, width
        ctx.mark_non_differentiable(of_first)
        return out, of_first

    @staticmethod
    @once_differentiable
    def backward(ctx: SelectedContext, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """With P the weights: dS = P * (dO vᵀ - rowsum(dO * O)), and dV = Pᵀ dO."""
        (q, sinks, out, lse, *more), (loops, scale, width) = ctx.saved_tensors, ctx.settings
        count = len(loops)
        k = more[:count]
        picked = more[count : 2 * count]
        bounds = more[2 * count :]
        queries = [Queries(bounds[2 * at], bounds[2 * at + 1], *loop) for at, loop in enumerate(loops)]
        dq, dk = torch.empty_like(q), [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in k]
        for parts in _parts(q, k, tuple(map(Keys, queries, picked))):
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
        of_sinks = None if sinks is None else sinks_grad(grad, out, lse, sinks)
        return dq, of_sinks, None, None, None, None, *(of.to(x.dtype) for of, x in zip(dk, k, strict=True))


def _parts(q: Tensor, k: Sequence[Tensor], seen: tuple[Keys, ...]) -> Iterator[list[Rows]]:
    """By chunk of queries, the rows of each set of keys."""
    hardware, of_sets = seen[0].queries.hardware, list(zip(*(each.queries.chunks for each in seen), strict=True))
    for chunks in hardware.each(of_sets):
        sets = zip(k, seen, chunks, strict=True)
        yield [Rows(q, x, each.queries, chunk, each.picked) for x, each, chunk in sets]


class Loss(NamedTuple):
    """The attention that the indexer is compared with."""

    q: Tensor
    """[n, b, h, w] of all queries of this rank's part of the sequence, of its heads; `k` [s, b, w]."""
    k: Tensor
    picked: Tensor | None
    """Selected keys; None for all."""
    queries: Queries
    scale: float
    heads: Axis
    """The ranks that have other heads."""
    own: range
    """The rows that this rank's index has the queries of."""
    beside: Tensor | None = None
    """[n, b, h]: log-sum-exps of the scores of what else is attended to."""


@torch.no_grad()
def divergence(index: Index, loss: Loss) -> tuple[Tensor, Index]:
    """The sum over this rank's queries of KL(p, softmax(scores)), and its gradients: with G = softmax(scores) - p those
    of weights are G ReLU(q · k), and those of q · k are G w where it is above 0."""
    wide = torch.promote_types(index.q.dtype, torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=index.q.device)
    found = Index(*(torch.zeros(x.shape, dtype=wide, device=x.device) for x in index))
    for chunk in loss.queries.hardware.each(loss.queries.chunks):
        rows = Rows(loss.q, loss.k, loss.queries, chunk, loss.picked)
        with again():
            scores = rows.scores(loss.scale)
            lse = scores.logsumexp(-1)
            lse = lse if loss.beside is None else torch.logaddexp(lse, loss.beside[chunk.rows])
            of_heads = scores.sub_(lse.unsqueeze(-1)).exp_().sum(2).contiguous()
        of_heads = all_reduce_(of_heads, loss.heads)
        of_heads.div_(of_heads.sum(-1, keepdim=True).clamp_(min=torch.finfo(wide).tiny))
        p, hidden = rows.distribution(of_heads)
        if chunk.rows.start not in loss.own:
            continue
        mine = chunk.moved(loss.own.start)
        products = index_products(index, mine)
        logs = index_scores(index, mine, products).masked_fill(hidden, -torch.inf).log_softmax(-1)
        logs.masked_fill_(hidden, -torch.inf)  # where a query sees no key, all are not a number
        total += (torch.xlogy(p, p) - p * logs.masked_fill(hidden, 0.0)).sum(dtype=torch.float64)
        g = (logs.exp_() - p).transpose(0, 1).unsqueeze(2)  # [b, rows, 1, keys]
        found.weights[mine.rows] = (products @ g.mT).squeeze(-1).transpose(0, 1)
        of_products = products.gt_(0).mul_(g).mul_(index.weights[mine.rows].transpose(0, 1).unsqueeze(-1))
        of_products = of_products.to(index.q.dtype).flatten(1, 2)  # [b, rows * indexer heads, keys]
        q = index.q[mine.rows].transpose(0, 1)
        dq = of_products @ index.k[: chunk.keys].transpose(0, 1)
        found.q[mine.rows] = dq.unflatten(1, q.shape[1:3]).transpose(0, 1).to(wide)
        found.k[: chunk.keys] += (of_products.mT @ q.flatten(1, 2)).transpose(0, 1)
    return total, Index(*(gradient.to(x.dtype) for gradient, x in zip(found, index, strict=True)))


class LossContext(AutogradContext):
    shapes: list[tuple[torch.Size, torch.dtype, torch.device]]
    scale: Tensor | None
    tally: Tensor
    entries: Tensor


class AttachLoss(torch.autograd.Function):
    """Passes `out` through. The backward adds the gradients of the indexer's loss times `scale`, and the loss to the
    tally, [sum of divergences, tokens]; without a loss the gradients are zero."""

    @staticmethod
    def forward(
        ctx: LossContext, out: Tensor, loss: Loss | None, scale: Tensor | None, tally: Tensor, *index: Tensor
    ) -> Tensor:
        ctx.shapes = [(x.shape, x.dtype, x.device) for x in index]
        ctx.scale = scale
        ctx.tally = tally
        if loss is not None:
            total, gradients = divergence(Index(*index), loss)
            ctx.entries = torch.stack((total, torch.full_like(total, index[0].shape[0] * index[0].shape[1])))
            ctx.save_for_backward(*gradients)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: LossContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if not gradients:
            zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)
            return grad, None, None, None, *zeros
        assert ctx.scale is not None
        ctx.tally.add_(ctx.entries)
        return grad, None, None, None, *(x * ctx.scale.to(x.dtype) for x in gradients)
