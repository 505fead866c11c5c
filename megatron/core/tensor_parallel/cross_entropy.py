"""Vocabulary-parallel cross entropy. The logits are sharded over the tensor-parallel ranks and are never gathered.

Each rank reduces its columns of the logits to three numbers per token. The ranks all-gather these numbers, and every
rank computes the loss from them. The backward pass recomputes the softmax, so the only large tensor that is saved is
the logits.
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
"""Number of logits that are converted to fp32 at a time. `CHUNK` limits the temporary memory on GPUs to a few times 64
MiB. `CPU_CHUNK` is small enough that the temporary memory fits in the CPU caches."""


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int, compiled: bool = False, z_loss_coeff: float = 0.0
) -> Tensor:
    """Compute the loss of each token: logits [s, b, V/t], labels [s, b] -> losses [s, b]. The losses are fp32, or fp64
    if the logits are fp64.

    If `z_loss_coeff` is not 0, each loss includes the z-loss, that is, z_loss_coeff * log(sum of exp(logits))^2 (arXiv
    2204.02311, section 5).

    Columns with index `vocab_size` or higher are padding. Padding columns are excluded from the sum of exp(logits), and
    their gradients are zero. A token whose loss is multiplied by zero contributes exactly zero to every gradient. A
    label outside [0, vocab_size) is an error (see `check_ids`).

    If the logits are neither a leaf nor a view, the backward pass overwrites them with their gradient, so that the
    gradient needs no additional memory. In this case, a second backward pass is an error. If `compiled` is True and the
    vocabulary is not sharded, a GPU kernel may overwrite the logits even in the forward pass. Clone the logits before
    this call if you need them afterwards.
    """
    check_ids(labels, vocab_size, "labels")
    overwrite = not logits.is_leaf and not is_view(logits)
    return _VocabParallelCrossEntropy.apply(logits, labels, tp, vocab_size, overwrite, compiled, z_loss_coeff)


def local_columns(logits: Tensor, vocab_size: int, tp: Axis) -> tuple[int, int]:
    """Return two numbers for this rank's `logits` [..., V/t]: the token id of the first column, and the number of
    columns that are not padding. All columns of a rank may be padding.
    """
    start, stop = local_rows(logits.shape[-1] * tp.size, tp)
    return start, max(0, min(vocab_size, stop) - start)


LOSS_AND_GRADIENT = "loss_and_gradient_"
"""Name of the kernel that computes losses [n] from (logits [n, width], labels [n], vocab_size, z_loss_coeff). The
kernel overwrites the logits with the gradients of the losses.

If no kernel is registered under this name, torch operations compute the gradients in the backward pass.
"""


class _CrossEntropyContext(AutogradContext):
    made: bool
    """True if the forward pass overwrote the logits with their gradient. In this case, the fields below are not set."""
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
        """Compute the gradient of the loss with respect to the logits, which is softmax * (1 + 2 * z_loss_coeff *
        log(sum of exp(logits))), minus 1 in the column of the label."""
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
    """Multiply each row of x [n, width] in place by the row's element of `factors` [n]. If the factor is 0, the row
    becomes 0 even if it contains non-finite values."""
    x.copy_(torch.where(factors[:, None] == 0, 0, x.float() * factors[:, None]))


def _gradient_(z: Tensor, top: Tensor, factor: Tensor, at_label: Tensor, label: Tensor, compiled: bool) -> None:
    """Overwrite z [n, columns] with exp(z - top) * factor, computed in the precision of `top`. In the column of the
    label, subtract `at_label` from this value. `top`, `factor`, `at_label` and `label` have one element per row."""
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
    """Return softmax statistics [3, s, b] of the first `columns` columns of the logits. For each token, the statistics
    are the maximum, the sum of exp(logit - maximum), and the logit of the label."""
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
    """Return the maximum z_max of each row of `z`, and the sum of exp(z - z_max) over each row."""
    if torch.compiler.is_compiling():
        # If z is converted first and the reductions keep their dims, torch.compile fuses the two reductions into a
        # single pass (online softmax, arXiv 1805.02867).
        z = z.to(dtype)
    top = z.amax(1, keepdim=True).to(dtype)
    return top.squeeze(1), (z - top).exp_().sum(1, keepdim=True).squeeze(1)


def _rows_at_a_time(rows: Tensor, compiled: bool) -> int:
    """Return the number of rows to process at a time. Compiled functions need no temporary memory, so they process all
    rows at once."""
    chunk = CPU_CHUNK if rows.device.type == "cpu" else CHUNK
    return max(1, rows.shape[0] if compiled else chunk // rows.shape[1])
