"""Cross entropy that overwrites the logits with their gradient. The logits are read from memory once, and the gradient
is written once.

The gradient of a token's loss depends on a sum over the vocabulary. A program of the kernel computes both the sum and
the gradient. The program therefore reads each row twice, the second time from the L2 cache. If the forward and the
backward pass were separate kernels, both would read all logits from memory. The backward pass only multiplies each row
by the gradient of the row's loss, and skips rows for which this gradient is 1."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.tensor_parallel.cross_entropy import scale_rows_
from megatron.extensions.speed.fusions.kernel_choice import FusedKernel, RunShapes, gpu_operator, no_result, runs_triton

ROWS = 4096
"""Maximum number of tokens for which the kernel is compared with plain torch. This number is sufficient, because the
logits of this many tokens occupy the whole GPU."""


def makes_gradients(logits: Tensor, *_: object) -> bool:
    """Return True if the kernel is used for `logits`. The kernel is not used in fp16, because it is not faster in this
    dtype. In fp16, loss gradients equal the loss scale instead of 1, so the backward pass cannot skip any row."""
    return runs_triton(logits) and logits.dtype in (torch.bfloat16, torch.float32)


def loss_and_gradient_twin_(logits: Tensor, labels: Tensor, vocab_size: int, z_loss_coeff: float) -> Tensor:
    """Compute the losses [n] in fp32, and overwrite the logits with the gradients of the losses.

    A loss is -log softmax(logits)[label] + z_loss_coeff * log(sum of exp(logits))^2. Both terms of the loss are
    computed in fp32.

    Args:
        logits: Logits [n, width].
        labels: Labels [n].
        vocab_size: Size of the vocabulary. The columns of the logits beyond this size are padding, and the gradients of
            the padding are zero.
        z_loss_coeff: Coefficient of the z-loss.
    """
    z, rows = logits[:, :vocab_size].float(), torch.arange(len(labels), device=labels.device)
    top = z.amax(1)
    exponentials = (z - top[:, None]).exp_()
    total = exponentials.sum(1)
    log_sum = total.log() + top
    losses, factors = total.log() + (top - z[rows, labels]), 1 / total
    if z_loss_coeff:
        losses, factors = losses + z_loss_coeff * log_sum.square(), factors * (1 + 2 * z_loss_coeff * log_sum)
    gradient = exponentials.mul_(factors[:, None])
    gradient[rows, labels] -= 1
    logits[:, :vocab_size] = gradient.to(logits.dtype)
    logits[:, vocab_size:] = 0
    return losses


def _fake_losses(logits: Tensor, labels: Tensor, vocab_size: int, z_loss_coeff: float) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


_loss_and_gradient_ = gpu_operator(
    "kernels.cross_entropy_triton:loss_and_gradient_",
    "(Tensor(a!) logits, Tensor labels, int vocab_size, float z_loss_coeff) -> Tensor",
    _fake_losses,
)
_scale_rows_ = gpu_operator(
    "kernels.cross_entropy_triton:scale_rows_", "(Tensor(a!) x, Tensor factors) -> ()", no_result
)


def _logits(shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random logits, and labels, for a chunk of tokens."""
    if shapes.vocab:
        rows = min(shapes.tokens, ROWS)
        labels = torch.arange(rows, device=shapes.device) % shapes.vocab
        yield shapes.random(rows, shapes.vocab), labels


LOSS = FusedKernel(
    _loss_and_gradient_,
    loss_and_gradient_twin_,
    makes_gradients,
    lambda shapes: ((logits, labels, shapes.vocab, 0.0) for logits, labels in _logits(shapes)),
    2.0**-6,
)
SCALE = FusedKernel(
    lambda x, factors: _scale_rows_(x, factors.contiguous()),
    scale_rows_,
    lambda x, factors: runs_triton(x),
    lambda shapes: ((logits, torch.ones_like(labels, dtype=torch.float32)) for logits, labels in _logits(shapes)),
    2.0**-7,
)
