"""Triton kernels of `cross_entropy.py`. Each program processes its rows one at a time, and reads a row in blocks.

Each multiprocessor runs only one program. All rows that are processed at the same time therefore fit into the L2 cache,
which serves the second read of each row. Each thread keeps its own largest logit and sum, for the same columns of every
block. Threads therefore need not exchange data for each block. In return, each thread computes one more exponential per
block.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.speed.fusions.kernel_choice import multiprocessors

THREADS = 1024
EACH = 16
WARPS = 32
"""Numbers of warps and threads per program, and number of adjacent columns that a thread processes in each block (32
bytes of bf16)."""

LOWEST = tl.constexpr(float(torch.finfo(torch.float32).min))
"""Initial value of a running maximum of logits. Unlike minus infinity, this number does not yield NaN if it is
subtracted from itself."""


@triton.jit
def loss_and_gradient(logits, labels, losses, n, width, columns, z_loss, THREADS: tl.constexpr, EACH: tl.constexpr):
    """Overwrite rows of `logits` [n, width] with the gradients of their losses [n]. Columns with an index of `columns`
    or higher are padding. `z_loss` is None if the coefficient of the z-loss is 0."""
    block = tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for step in range(0, tl.cdiv(n, tl.num_programs(0))):
        row = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        if row < n:
            _of_row(logits + row * width, labels + row, losses + row, block, width, columns, z_loss, THREADS, EACH)


@triton.jit
def _of_row(place, labels, losses, block, width, columns, z_loss, THREADS: tl.constexpr, EACH: tl.constexpr):
    """Replace one row of logits by the gradient of the row's loss. `place` is a pointer to the row."""
    label = tl.load(labels)
    target = tl.load(place + label).to(tl.float32)
    top = tl.full([THREADS], LOWEST, tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    for start in range(0, columns, THREADS * EACH):
        j = start + block
        z = tl.load(place + j, mask=j < columns, other=LOWEST, eviction_policy="evict_last").to(tl.float32)
        higher = tl.maximum(top, tl.max(z, axis=1))
        total = total * tl.exp(top - higher) + tl.sum(tl.where(j < columns, tl.exp(z - higher[:, None]), 0.0), axis=1)
        top = higher
    highest = tl.max(top, axis=0)
    whole = tl.sum(total * tl.exp(top - highest), axis=0)
    loss = tl.log(whole) + (highest - target)
    factor = 1.0 / whole
    if z_loss is not None:
        log_sum = tl.log(whole) + highest
        loss += z_loss * log_sum * log_sum
        factor *= 1.0 + 2.0 * z_loss * log_sum
    tl.store(losses, loss)
    for start in range(0, width, THREADS * EACH):
        j = start + block
        z = tl.load(place + j, mask=j < columns, other=LOWEST, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.exp(z - highest) * factor
        gradient = tl.where(j == label, gradient - 1.0, gradient)
        gradient = tl.where(j < columns, gradient, 0.0)
        tl.store(place + j, gradient.to(place.dtype.element_ty), mask=j < width, eviction_policy="evict_first")


@triton.jit
def scale_row(x, factors, width, BLOCK: tl.constexpr):
    """Multiply one row of x [n, width] in place by the factor of this row."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row)
    if factor != 1.0:
        read = tl.where(factor == 0.0, 0, width)
        for start in range(0, width, BLOCK):
            j = start + tl.arange(0, BLOCK)
            inside = j < width
            values = tl.load(x + row * width + j, mask=j < read, other=0.0).to(tl.float32) * factor
            tl.store(x + row * width + j, values.to(x.dtype.element_ty), mask=inside)


def loss_and_gradient_(logits: Tensor, labels: Tensor, vocab_size: int, z_loss_coeff: float) -> Tensor:
    """Launch the kernel that is equivalent to `cross_entropy.loss_and_gradient_twin_`."""
    assert logits.is_contiguous() and labels.is_contiguous()
    n, width = logits.shape
    losses = torch.empty(n, device=logits.device)
    if n:
        programs, z_loss = min(n, multiprocessors(logits.device)), float(z_loss_coeff) or None
        operands = logits, labels, losses, n, width, vocab_size, z_loss, THREADS, EACH
        loss_and_gradient[(programs,)](*operands, num_warps=WARPS)
    return losses


def scale_rows_(x: Tensor, factors: Tensor) -> None:
    """Launch the kernel that multiplies rows by factors in place."""
    assert x.is_contiguous() and factors.is_contiguous()
    if x.numel():
        scale_row[(x.shape[0],)](x, factors, x.shape[1], THREADS * EACH, num_warps=WARPS)
