"""Cross entropy over a vocabulary that is cut over the tensor-parallel ranks, with no gathered logits.

Each rank reduces its own columns to three numbers a token, and one all-gather of these gives every rank the loss.
The backward computes the softmax again, so the logits themselves are all that is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.mappings import all_gather
from megatron.core.tensor_parallel.vocabulary import check_ids, local_rows

CHUNK = 2**24
"""Logits converted to fp32 at a time: bounds the temporary memory to a few times 64 MiB."""


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int) -> Tensor:
    """logits [s, b, V/tp], labels [s, b] -> loss of each token [s, b], in fp32, or fp64 for fp64 logits.

    Columns from `vocab_size` on are padding: absent from the sum, and with a gradient of zero. A token whose loss is
    multiplied by zero contributes exactly zero to every gradient. ValueError for a label outside [0, vocab_size).

    The gradient is written over the logits where they are an intermediate result, which saves as much memory again;
    autograd then refuses a second backward through them. Clone logits that are to be read after the backward.
    """
    check_ids(labels, vocab_size, "labels")
    overwrite = not logits.is_leaf and not logits._is_view()
    return _VocabParallelCrossEntropy.apply(logits, labels, tp, vocab_size, overwrite)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int, overwrite: bool) -> Tensor:
        start, stop = local_rows(logits.shape[-1] * tp.size, tp)
        columns = max(0, min(vocab_size, stop) - start)
        elsewhere = (labels < start) | (labels >= start + columns)
        local_labels = (labels - start).masked_fill_(elsewhere, 0)

        stats = _local_stats(logits, local_labels, columns)
        stats[2].masked_fill_(elsewhere, 0.0)
        maxima, sums, targets = all_gather(stats[None], tp).unbind(1)  # each [tp, s, b]
        maximum = maxima.amax(0)
        total = (sums * (maxima - maximum).exp_()).sum(0)

        ctx.save_for_backward(logits, local_labels, elsewhere, maximum, total)
        ctx.columns, ctx.overwrite = columns, overwrite
        return total.log() + (maximum - targets.sum(0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """d loss / d logit = softmax - (1 at the label)"""
        logits, local_labels, elsewhere, maximum, total = ctx.saved_tensors
        grad = logits if ctx.overwrite else torch.empty_like(logits)
        columns, width = ctx.columns, logits.shape[-1]
        at_label = grad_loss.masked_fill(elsewhere, 0.0)
        per_token = maximum, grad_loss / total, at_label, local_labels
        step = _rows_at_a_time(width)
        for z, out, top, factor, g, label in zip(
            logits.reshape(-1, width).split(step),
            grad.view(-1, width).split(step),
            *(values.flatten().split(step) for values in per_token),
            strict=True,
        ):
            if columns:
                term = z[:, :columns].to(maximum.dtype, copy=True).sub_(top[:, None]).exp_().mul_(factor[:, None])
                term[torch.arange(len(label), device=label.device), label] -= g
                out[:, :columns].copy_(term)
            out[:, columns:].zero_()
        return grad.detach(), None, None, None, None


def _local_stats(logits: Tensor, local_labels: Tensor, columns: int) -> Tensor:
    """[3, s, b]: the largest of the first `columns` logits, the sum of exponentials below it, the label's logit."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    stats = torch.zeros(3, *local_labels.shape, dtype=dtype, device=logits.device)
    if not columns:
        stats[0].fill_(-torch.inf)
        return stats
    flat_logits = logits.reshape(-1, logits.shape[-1])[:, :columns]
    step = _rows_at_a_time(logits.shape[-1])
    for rows, label, out in zip(
        flat_logits.split(step), local_labels.flatten().split(step), stats.view(3, -1).split(step, 1), strict=True
    ):
        z = rows.to(dtype, copy=True)
        torch.amax(z, 1, out=out[0])
        out[2].copy_(z.gather(1, label[:, None]).squeeze(1))
        torch.sum(z.sub_(out[0][:, None]).exp_(), 1, out=out[1])
    return stats


def _rows_at_a_time(width: int) -> int:
    return max(1, CHUNK // width)
