"""Vocabulary-parallel cross entropy: the loss of logits that are sharded over the tensor-parallel ranks and never
gathered.

Each rank reduces its columns of the logits to three numbers per token. After an all-gather of the three numbers, every
rank computes the loss. The backward pass recomputes the softmax, so that only the logits are saved.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import all_gather
from megatron.core.compiled_regions import region
from megatron.core.kernels import kernel_for, operation
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import check_ids, local_rows
from megatron.core.torch_private import AutogradContext, is_view

CHUNK, CPU_CHUNK = 2**24, 2**20
"""Number of logits converted to fp32 at a time. `CHUNK` limits the temporary memory on GPUs to a few times 64 MiB.
`CPU_CHUNK` is small enough that the temporary memory fits in the CPU caches."""


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int, compiled: bool = False, z_loss_coeff: float = 0.0
) -> Tensor:
    """Compute per-token losses: logits [s, b, V/t], labels [s, b] -> [s, b], in fp32, or fp64 for fp64 logits.

    If `z_loss_coeff` is not 0, each loss includes the z-loss: the coefficient times the square of log(sum of
    exp(logits)) (arXiv 2204.02311, section 5).

    Columns with index `vocab_size` or higher are padding. Padding columns are excluded from the sum, and their
    gradients are zero. A token whose loss is multiplied by zero contributes exactly zero to every gradient. Raises
    ValueError for a label outside [0, vocab_size).

    If the logits are neither a leaf nor a view, the backward pass overwrites them with their gradient, which halves the
    memory. Because the logits are overwritten, autograd refuses a second backward pass through them. Clone the logits
    before this call if you read them later: if `compiled` GPU kernels process the whole vocabulary, even the forward
    pass overwrites the logits.
    """
    check_ids(labels, vocab_size, "labels")
    overwrite = not logits.is_leaf and not is_view(logits)
    return _VocabParallelCrossEntropy.apply(logits, labels, tp, vocab_size, overwrite, compiled, z_loss_coeff)


def local_columns(logits: Tensor, vocab_size: int, tp: Axis) -> tuple[int, int]:
    """Return the token id of this rank's first column of `logits` [..., V/t], and the number of its columns that are
    not padding. All columns of a rank may be padding.
    """
    start, stop = local_rows(logits.shape[-1] * tp.size, tp)
    return start, max(0, min(vocab_size, stop) - start)


LOSS_AND_GRADIENT = "loss_and_gradient_"
"""Name of the kernel that maps (logits [n, width], labels [n], vocabulary, z-loss coefficient) to losses [n]. The
kernel overwrites the logits with their gradients.

If no kernel is registered under this name, plain torch computes the gradients in the backward pass.
"""


class _CrossEntropyContext(AutogradContext):
    made: bool
    """True if the logits were overwritten with their gradient. If `made` is True, all fields below are unset."""
    columns: int
    overwrite: bool
    compiled: bool
    z_loss_coeff: float


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _CrossEntropyContext,
        logits: Tensor,
        labels: Tensor,
        tp: Axis,
        vocab_size: int,
        overwrite: bool,
        compiled: bool,
        z_loss_coeff: float,
    ) -> Tensor:
        whole = compiled and overwrite and tp.size == 1 and ctx.needs_input_grad[0]
        make = kernel_for(LOSS_AND_GRADIENT, logits) if whole else None
        ctx.made = make is not None
        if make is not None:
            flat = logits.view(-1, logits.shape[-1]), labels.flatten()
            ctx.save_for_backward(logits)
            return make(*flat, vocab_size, z_loss_coeff).view(labels.shape)
        start, columns = local_columns(logits, vocab_size, tp)
        elsewhere = (labels < start) | (labels >= start + columns)
        local_labels = (labels - start).masked_fill_(elsewhere, 0)

        stats = _local_stats(logits, local_labels, columns, compiled)
        stats[2].masked_fill_(elsewhere, 0.0)
        maxima, sums, targets = all_gather(stats[None], tp).unbind(1)  # three tensors of shape [tp, s, b]
        maximum = maxima.amax(0)
        total = (sums * (maxima - maximum).exp_()).sum(0)

        ctx.save_for_backward(logits, local_labels, elsewhere, maximum, total)
        ctx.columns = columns
        ctx.overwrite = overwrite
        ctx.compiled = compiled
        ctx.z_loss_coeff = z_loss_coeff
        loss = total.log() + (maximum - targets.sum(0))
        return loss + z_loss_coeff * (total.log() + maximum).square() if z_loss_coeff else loss

    @staticmethod
    @once_differentiable
    def backward(ctx: _CrossEntropyContext, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of the loss with respect to the logits: softmax * (1 + 2 * z_loss_coeff * log(sum of
        exp)), minus 1 at the label."""
        if ctx.made:
            (made,) = ctx.saved_tensors
            scale_rows_(made.view(-1, made.shape[-1]), grad_loss.flatten())
            return made.detach(), None, None, None, None, None, None
        logits, local_labels, elsewhere, maximum, total = ctx.saved_tensors
        grad = logits if ctx.overwrite else logits.clone(memory_format=torch.contiguous_format)
        columns, width = ctx.columns, logits.shape[-1]
        at_label = grad_loss.masked_fill(elsewhere, 0.0)
        of_sum = grad_loss
        if ctx.z_loss_coeff:
            of_sum = grad_loss * (1 + 2 * ctx.z_loss_coeff * (total.log() + maximum))
        per_token = maximum, of_sum / total, at_label, local_labels
        rows = grad.view(-1, width)
        step = _rows_at_a_time(rows, ctx.compiled)
        parts = (values.flatten().split(step) for values in per_token)
        for out, top, factor, g, label in zip(rows.split(step), *parts, strict=True):
            if columns:
                _gradient_(out[:, :columns], top, factor, g, label, ctx.compiled)
            out[:, columns:].zero_()
        return grad.detach(), None, None, None, None, None, None


@operation
def scale_rows_(x: Tensor, factors: Tensor) -> None:
    """Multiply each row of x [n, width] by its factor in `factors` [n], in place. Rows with factor 0 become 0 even if
    they contain non-finite values."""
    x.copy_(torch.where(factors[:, None] == 0, 0, x.float() * factors[:, None]))


def _gradient_(z: Tensor, top: Tensor, factor: Tensor, at_label: Tensor, label: Tensor, compiled: bool) -> None:
    """Overwrite z [n, columns] with exp(z - top) * factor, computed in the precision of `top`. In each row, subtract
    `at_label` in the column of the label."""
    rows = torch.arange(z.shape[0], device=z.device)
    target = (z[rows, label] - top).exp_().mul_(factor).sub_(at_label)
    region(_exponentials_, compiled)(z, top, factor)
    z.index_put_((rows, label), target.to(z.dtype))  # On CPU, scatter_ would copy all of z.


def _exponentials_(z: Tensor, top: Tensor, factor: Tensor) -> None:
    if z.dtype == top.dtype:
        z.sub_(top[:, None]).exp_().mul_(factor[:, None])
    else:
        z.copy_((z - top[:, None]).exp_().mul_(factor[:, None]))


def _local_stats(logits: Tensor, local_labels: Tensor, columns: int, compiled: bool) -> Tensor:
    """Return softmax statistics [3, s, b] of the first `columns` logits: maximum, sum of exp(logit - maximum), and the
    label's logit."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    stats = torch.zeros(3, *local_labels.shape, dtype=dtype, device=logits.device)
    if not columns:
        stats[0].fill_(-torch.inf)
        return stats
    rows = logits.reshape(-1, logits.shape[-1])[:, :columns]
    step = _rows_at_a_time(rows, compiled)
    for z, label, out in zip(
        rows.split(step), local_labels.flatten().split(step), stats.view(3, -1).split(step, 1), strict=True
    ):
        out[0], out[1] = region(_largest_and_sum, compiled)(z, dtype)
        out[2] = z.gather(1, label[:, None]).squeeze(1)
    return stats


def _largest_and_sum(z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two values for each row of `z`: its maximum z_max, and the sum of exp(z - z_max) over the row."""
    if torch.compiler.is_compiling():
        # with the conversion first and dims kept, torch.compile fuses both into one pass: an online softmax (arXiv
        # 1805.02867)
        z = z.to(dtype)
    top = z.amax(1, keepdim=True).to(dtype)
    return top.squeeze(1), (z - top).exp_().sum(1, keepdim=True).squeeze(1)


def _rows_at_a_time(rows: Tensor, compiled: bool) -> int:
    """Return the number of rows to process at a time. Compiled regions need no temporary memory, and process all rows
    at once."""
    chunk = CPU_CHUNK if rows.device.type == "cpu" else CHUNK
    return max(1, rows.shape[0] if compiled else chunk // rows.shape[1])
