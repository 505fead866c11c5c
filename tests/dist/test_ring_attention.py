"""Attention over context-parallel ranks against one process: outputs, gradients, and what goes over the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.core_attention import CONTEXT_PARALLEL
from megatron.core.attention.flash_kernels import FlashCPUKernel
from megatron.core.attention.tile_kernels import Causal, Dropout, Kernel, TorchKernel
from megatron.core.attention.tiles import rank_spans
from megatron.core.parallel_state import Axis
from tests.harness import run_world

SCALE, LENGTH, SAMPLES, HEADS, DIM = 0.4, 48, 2, 8, 8
PACKED = ((0, 1, 6, 17, 33), (0, 23, 29, 47))
SAME = ((0, 11, 37), (0, 11, 37))
CASES = [
    # groups, documents, window, dropout
    (8, None, None, False),
    (4, PACKED, None, False),
    (4, SAME, 9, False),
    (8, PACKED, 7, True),
    (4, None, 31, True),
    (4, None, 3, False),
]


def operands(groups: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(groups)
    shapes = [(LENGTH, SAMPLES, n, DIM) for n in (HEADS, groups, groups, HEADS)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def kernel_of(dropout: bool, first_head: int = 0) -> Kernel:
    if dropout:
        return TorchKernel(SCALE, Dropout(0.2, 5, first_head, torch.tensor([3, 8])))
    return FlashCPUKernel(SCALE)


def expected(groups: int, documents: Any, window: int | None, dropout: bool) -> list[Tensor]:
    q, k, v, grad = operands(groups)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = local_attention(q, k, v, Causal(kernel_of(dropout), documents, window))
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def on_rank(rank: int, size: int, kind: str, cases: list[Any]) -> list[list[Any]]:
    cp = Axis(dist.group.WORLD, rank, size, tuple(range(size)))
    rows = [place for span in rank_spans(LENGTH, rank, size) for place in span]
    found = []
    for groups, documents, window, dropout in cases:
        q, k, v, grad = (x[rows] for x in operands(groups))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        kernel = kernel_of(dropout, HEADS // size * rank if kind == "a2a" else 0)
        out = CONTEXT_PARALLEL[kind](q, k, v, cp, Causal(kernel, documents, window))
        found.append([x.numpy() for x in (out.detach(), *torch.autograd.grad(out, inputs, grad))])
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", CONTEXT_PARALLEL)
def test_parts_of_the_whole(kind: str, size: int) -> None:
    cases = [*CASES, (2, PACKED, 13, False), (1, None, None, False)] if kind != "a2a" else CASES
    whole = [expected(*case) for case in cases]
    for rank, results in enumerate(run_world(size, on_rank, kind, cases)):
        rows = [place for span in rank_spans(LENGTH, rank, size) for place in span]
        for case, values, parts in zip(cases, whole, results, strict=True):
            for name, value, part in zip(("out", "dq", "dk", "dv"), values, parts, strict=True):
                torch.testing.assert_close(
                    torch.from_numpy(part),
                    value[rows],
                    rtol=1e-12,
                    atol=1e-12,
                    msg=lambda m, c=case, n=name: f"{c} {n}: {m}",
                )


def count_messages(rank: int, size: int, groups: int) -> list[int]:
    sent: list[int] = []
    original = dist.batch_isend_irecv

    def counting(ops: list[Any]) -> Any:
        sent.extend(op.tensor.numel() for op in ops if op.op is dist.isend)
        return original(ops)

    dist.batch_isend_irecv = counting
    try:
        on_rank(rank, size, "p2p", [(groups, None, None, False)])
    finally:
        dist.batch_isend_irecv = original
    return sent


def test_only_groups_of_keys_travel() -> None:
    """Forward cp - 1 times the keys and values of a rank; backward as many, and their gradients cp times."""
    for sent in run_world(4, count_messages, 2):
        assert sent == [2 * LENGTH // 4 * SAMPLES * 2 * DIM] * (3 + 3 + 4)


def low_precision(rank: int, size: int) -> float:
    cp = Axis(dist.group.WORLD, rank, size, tuple(range(size)))
    rows = [place for span in rank_spans(LENGTH, rank, size) for place in span]
    exact = expected(4, PACKED, None, False)
    q, k, v, grad = (x[rows].bfloat16() for x in operands(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = CONTEXT_PARALLEL["p2p"](q, k, v, cp, Causal(FlashCPUKernel(SCALE), PACKED))
    results = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    assert all(result.dtype == torch.bfloat16 for result in results)
    return max(
        ((part.double() - value[rows]).norm() / value[rows].norm()).item()
        for part, value in zip(results, exact, strict=True)
    )


def test_bfloat16_is_summed_in_fp32() -> None:
    assert max(run_world(4, low_precision)) < 0.01
