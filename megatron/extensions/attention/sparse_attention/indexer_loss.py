"""Computation of the indexer loss in chunks of queries. The kernels in `kernels/divergence.py` compute the loss over
selected keys on GPUs.

Equation numbers refer to DeepSeek-V3.2 (arXiv 2512.02556), section 2.1. The loss of a token is KL(p, softmax(scores)).
The target distribution p of a query is the mean of its attention weights over heads. The distribution p covers either
the selected keys or all keys that the query may attend to (equations 3 and 4). If attention has several key sets, p
consists of the attention weights of the selected keys, divided by the sum of these weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import all_reduce_
from megatron.core.compiled_regions import torch_function
from megatron.core.kernels import operation
from megatron.core.parallel_state import Axis
from megatron.core.torch_private import AutogradContext
from megatron.core.transformer.recompute import again
from megatron.extensions.attention.sparse_attention.selected_attention import Rows, attended_weights
from megatron.extensions.attention.sparse_attention.selection import Index, Queries, index_products, index_scores


class Loss(NamedTuple):
    """Operands of the indexer loss. The attention weights that are the training target of the indexer are computed from
    some of these operands."""

    q: Tensor
    """Attention queries [n, b, h, w] of this rank's heads for the tokens in this rank's sequence shard. The attention
    keys `k` are [s, b, w]."""
    k: Tensor
    picked: Tensor | None
    """Indices [n, b, topk] of the selected keys; None if the loss covers all keys."""
    queries: Queries
    scale: float
    heads: Axis
    """Group of ranks over which the attention heads are sharded."""
    own: range
    """Range of queries in `q` for which this rank computes the loss."""
    beside: Tensor | None = None
    """Log-sum-exps [n, b, h] of the scores of the sinks and of the attended keys that are not in `k`."""
    lse: Tensor | None = None
    """Log-sum-exps [n, b, h] of the scores of all attended keys and sinks; None if the loss covers all keys instead of
    the keys in `picked`."""


@operation
@torch_function
def divergence(index: Index, loss: Loss) -> tuple[Tensor, Index]:
    """Return the indexer loss and its gradients. The loss is the sum of KL(p, softmax(scores)) over this rank's
    queries. Let G = softmax(scores) - p be the gradient of a score. The gradient of a head weight w is the sum of G
    ReLU(q · k) over keys. The gradient of a product q · k is G w if the product is positive, and 0 otherwise."""
    wide = torch.promote_types(index.q.dtype, torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=index.q.device)
    found = Index(*(torch.zeros(x.shape, dtype=wide, device=x.device) for x in index))
    for chunk in loss.queries.hardware.each(loss.queries.chunks):
        rows = Rows(loss.q, loss.k, loss.queries, chunk, loss.picked)
        with again():
            beside, lse = (None if x is None else x[chunk.rows] for x in (loss.beside, loss.lse))
            of_heads = attended_weights(rows.q, rows, loss.scale, beside, lse)
        of_heads = all_reduce_(of_heads, loss.heads)
        of_heads.div_(of_heads.sum(-1, keepdim=True).clamp_(min=torch.finfo(wide).tiny))
        p, hidden = rows.distribution(of_heads)
        if chunk.rows.start not in loss.own:
            continue
        mine = chunk.moved(loss.own.start)
        products = index_products(index, mine)
        logs = index_scores(index, mine, products).masked_fill(hidden, -torch.inf).log_softmax(-1)
        # For a query without keys, log_softmax returns NaN, which is replaced here.
        logs.masked_fill_(hidden, -torch.inf)
        total += (torch.xlogy(p, p) - p * logs.masked_fill(hidden, 0.0)).sum(dtype=torch.float64)
        g = (logs.exp_() - p).transpose(0, 1).unsqueeze(2)  # g: [b, rows, 1, keys], gradients of the scores
        found.weights[mine.rows] = (products @ g.mT).squeeze(-1).transpose(0, 1)
        of_products = products.gt_(0).mul_(g).mul_(index.weights[mine.rows].transpose(0, 1).unsqueeze(-1))
        of_products = of_products.to(index.q.dtype).flatten(1, 2)  # of_products: [b, rows * indexer heads, keys]
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
    """Autograd function that returns `out` unchanged. In the backward pass, the operands in `index` receive the
    gradients of the indexer loss times `scale`, or zeros if `loss` is None. The backward pass also adds the loss and
    the number of tokens to `tally`."""

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
