"""Variable-length causal attention. One kernel launch computes all documents of a micro-batch.

The input of the kernel consists of packed sequences of any lengths, and the start row of each sequence (`cu_seqlens`).
The kernel is not used on CPU, under context parallelism, or with dropout. In these cases, attention is computed tile by
tile, with the same result (`local_attention`, `ring_attention`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Generic, Protocol, TypeVarTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.attention.tiles import Documents
from megatron.core.host_to_device import integers_on
from megatron.core.torch_private import AutogradContext

Lengths = tuple[Tensor, Tensor, int, int]
"""Lengths of n packed sequences: `cu_seqlens` [n + 1] int32 of the queries, `cu_seqlens` of the keys, length of the
longest query sequence, length of the longest key sequence."""

Window = tuple[int, int]
"""Pair (left, right): number of keys that a query sees before and after its own position; -1 means all keys. The last
query of a sequence has the same position as the sequence's last key."""


class PackedKernel(Protocol):
    """Attention kernel for packed sequences of different lengths, with an optional sliding window."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, window: Window) -> tuple[Tensor, ...]:
        """Compute attention for packed queries q [rows, heads, d], keys k [key rows, groups, d] and values v [key rows,
        groups, dv].

        The method returns the output [rows, heads, dv], the log-sum-exp [heads, rows] in fp32, and any further tensors
        for the backward pass.
        """

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], lengths: Lengths, window: Window
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. `grad` [rows, heads, dv] may have any strides. `kept` contains the
        tensors that `forward` returned: the output, the log-sum-exp and any further tensors."""


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    window: int | None,
    kernel: PackedKernel,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with a packed kernel: q [s, b, heads, d], k [s, b, groups, d], v [s, b, groups, dv] of whole
    samples, sinks [heads] -> [s, b, heads, dv]."""
    length, samples = q.shape[:2]
    settings = _lengths(documents or ((0,),) * samples, length, q.device), (-1 if window is None else window - 1, 0)
    # Pack the samples one after the other. A batch with a single sample is not copied.
    packed = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    rows: Tensor = PackedAttention.apply(*packed, sinks, kernel, *settings)
    return rows.unflatten(0, (samples, length)).transpose(0, 1)


Settings = TypeVarTuple("Settings")


class SettableKernel(Protocol[*Settings]):
    """Generalization of `PackedKernel`. The operands may have any shapes, and the kernel defines the arguments after q,
    k and v (`settings`)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *settings: *Settings) -> tuple[Tensor, ...]:
        """Return the output, the log-sum-exp, and any further tensors for the backward pass."""

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], *settings: *Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""


class PackedContext(AutogradContext, Generic[*Settings]):
    kernel: SettableKernel[*Settings]
    settings: tuple[*Settings]


class PackedAttention(torch.autograd.Function):
    """Autograd Function that computes attention with a `SettableKernel`, and saves the kernel's results for the
    backward pass."""

    @staticmethod
    def forward(
        ctx: PackedContext[*Settings],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        kernel: SettableKernel[*Settings],
        *settings: *Settings,
    ) -> Tensor:
        kept = kernel.forward(q, k, v, *settings)
        if sinks is not None:
            add_sinks_(kept[0], kept[1].movedim(0, -1), sinks)
        ctx.save_for_backward(q, k, v, sinks, *kept)
        ctx.kernel, ctx.settings = kernel, settings
        return kept[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: PackedContext[*Settings], grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, *kept = ctx.saved_tensors
        of_sinks = None if sinks is None else sinks_grad(grad, kept[0], kept[1].movedim(0, -1), sinks)
        gradients = ctx.kernel.backward(grad, (q, k, v), tuple(kept), *ctx.settings)
        return *gradients, of_sinks, None, *(None for _ in ctx.settings)


@lru_cache(maxsize=64)
def _lengths(documents: Documents, length: int, device: torch.device) -> Lengths:
    lengths = tuple(stop - start for starts in documents for start, stop in pairwise((*starts, length)))
    starts, longest = cumulative_lengths(lengths, device), max(lengths)
    return starts, starts, longest, longest


@lru_cache(maxsize=64)
def cumulative_lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return cu_seqlens, [n + 1] int32 on the device. The result is cached, so that all layers and passes of a
    micro-batch share one tensor."""
    return integers_on(device, tuple(accumulate(lengths, initial=0)), torch.int32)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add attention sinks [heads] to the output [..., heads, dv] and the log-sum-exp [..., heads] of a kernel, in
    place.

    A sink z is an additional score in each softmax row. The sink has no value vector, so it allows a head to attend to
    nothing (gpt-oss). arXiv 2309.17453 describes sinks that emerge during training in models without this additional
    score. This function corrects each output row of a kernel that does not support sinks:

        lse' = log(exp(lse) + exp(z)),   out' = exp(lse - lse') out

    With out' and lse' in place of out and lse, the kernel's backward pass returns the correct gradients of queries,
    keys and values. The attention weights become exp(score - lse'). The gradient of the softmax contains the sum of
    (gradient * weight) over each row. Because the sink has no value vector, this sum still equals the sum of grad *
    out' over the channels.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_((lse - total).exp_()[..., None])
    lse.copy_(total)


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the sinks' gradient [heads].

    Args:
        grad: Gradient of the output [..., heads, dv].
        out: The output [..., heads, dv].
        lse: The log-sum-exp [..., heads].
        sinks: The sinks [heads].
    """
    weights = (sinks.to(lse.dtype) - lse).exp()
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return (weights * delta).neg_().flatten(0, -2).sum(0).to(sinks.dtype)
