"""Attention sinks: one more score in each row of the softmax, which no value belongs to.

A head may attend to nothing: its weights add up to less than 1 (gpt-oss; arXiv 2309.17453 of where they form without).
A sink z changes what a kernel without one returns, row by row:

    lse' = log(exp(lse) + exp(z)),   out' = exp(lse - lse') out

With out' and lse' in place of out and lse, the kernels' backward gives the gradients of queries, keys and values: the
weights are exp(score - lse'), and the sum over the row that each weight's gradient is compared with is grad * out', as
nothing flows to the sink's value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds sinks [heads] to the output [..., heads, dv] and log-sum-exp [..., heads] of kernels, in place."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_((lse - total).exp_()[..., None])
    lse.copy_(total)


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[heads]: gradient of the sinks from that of the output [..., heads, dv], the output and the log-sum-exp."""
    weights = (sinks.to(lse.dtype) - lse).exp()
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return (weights * delta).neg_().flatten(0, -2).sum(0).to(sinks.dtype)
