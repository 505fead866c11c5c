"""Tests of the messages of ring attention and of the precision of its partial sums. The parity matrix covers layouts
with ring attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.attention.backends import CONTEXT_PARALLEL
from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.tile_kernels import Causal
from megatron.core.attention.tiles import rank_spans
from megatron.core.parallel_state import Axis
from megatron.extensions.speed.fusions.attention.flash_kernels import FlashCPUKernel
from tests.harness import run_world

LENGTH, SAMPLES, HEADS, GROUPS, DIM = 48, 2, 8, 2, 8
PACKED = Causal(FlashCPUKernel(0.4), ((0, 1, 6, 17, 33), (0, 23, 29, 47)))


def operands() -> list[Tensor]:
    """Return q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(LENGTH, SAMPLES, n, DIM) for n in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def rows_of(rank: int, size: int) -> list[int]:
    return [place for span in rank_spans(LENGTH, rank, size) for place in span]


def ring(rank: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return this rank's shards of the output and of the gradients of q, k and v."""
    cp = Axis(dist.group.WORLD, rank, size, tuple(range(size)))
    *inputs, grad = (x[rows_of(rank, size)].to(dtype).requires_grad_() for x in operands())
    out = CONTEXT_PARALLEL["p2p"](*inputs, cp, PACKED)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def sizes_of_messages(rank: int, size: int) -> list[int]:
    sent: list[int] = []
    original = dist.batch_isend_irecv

    def counting(ops: list[Any]) -> Any:
        sent.extend(op.tensor.numel() for op in ops if op.op is dist.isend)
        return original(ops)

    dist.batch_isend_irecv = counting
    ring(rank, size, torch.float64)
    return sent


def test_only_the_heads_of_keys_and_values_are_sent() -> None:
    """In the forward pass, every rank sends keys and values cp - 1 times. In the backward pass, every rank sends keys
    and values cp - 1 times, and sends the gradients of keys and values cp times."""
    for sent in run_world(4, sizes_of_messages):
        assert sent == [2 * LENGTH // 4 * SAMPLES * GROUPS * DIM] * (3 + 3 + 4)


def test_bfloat16_is_summed_in_fp32() -> None:
    *inputs, grad = operands()
    out = local_attention(*(x.requires_grad_() for x in inputs), PACKED)
    exact = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    for rank, parts in enumerate(run_world(4, ring, torch.bfloat16)):
        for part, whole in zip(parts, exact, strict=True):
            expected = whole[rows_of(rank, 4)]
            assert part.dtype == torch.bfloat16
            assert (part.double() - expected).norm() < 0.01 * expected.norm()
