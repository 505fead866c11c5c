"""Overlapped tensor-parallel layers compute the same results as plain layers and send the same number of bytes. The
parity matrix (tests/parity) trains models with overlapped layers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from megatron.core.collectives import all_gather
from megatron.core.init import initialize_parameters_
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.core.param_meta import Init
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TPContext,
    column_parallel,
    row_parallel,
)
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.extensions.speed.overlap.comm_overlap import (
    OverlappedColumnParallelLinear,
    SymmetricMemory,
    SymmetricOverlap,
)
from megatron.extensions.speed.overlap.flags import OverlapFlags
from megatron.training.config.arguments import parse_args
from megatron.training.hooks import Parts
from megatron.training.initialize import Runtime
from megatron.training.reliability.launch import Launch
from tests.dist.test_collective_counts import recorded, ring_bytes
from tests.harness import run_world, tp_context
from tests.tiny import TINY

RUN = f"{TINY} --sequence-parallel --tp-comm-overlap-method symmetric".split()

S, B, H = 8, 3, 8
Layers = tuple[ColumnParallelLinear, RowParallelLinear]


def build(size: int, overlap: str | None, queue: WeightGradQueue) -> tuple[TPContext, Layers]:
    state = initialize_model_parallel(size)
    options = OverlapFlags(tp_comm_overlap=overlap is not None, tp_comm_overlap_method=overlap)
    ctx = tp_context(state, True, queue=queue, extension_options=(options,))
    column = column_parallel(ColumnLinear("fc1", H, (2, 4 * H), True, shard_dim=1, init=Init("normal", 1.0)), ctx)
    row = row_parallel(RowLinear("fc2", 8 * H, H, True, init=Init("normal", 1.0)), ctx)
    parameters = [*column.parameters(), *row.parameters()]
    initialize_parameters_(parameters, 0, state.coords)
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)
    return ctx, (column, row)


def run_layers(
    rank: int, size: int, overlap: str | None, deferred: bool, fallback: bool = False
) -> tuple[dict[str, Tensor], tuple[Fraction, Fraction]]:
    """Run two linear layers. Return their outputs and gradients, gathered from all ranks, and the bytes that this rank
    sends in the forward pass and in the backward pass."""
    if fallback:
        names = "_fused_all_gather_matmul_fallback", "_fused_matmul_reduce_scatter_fallback"
        operations = tuple(getattr(_symmetric_memory, name) for name in names)
        SymmetricOverlap.operations = staticmethod(lambda: operations)  # type: ignore[method-assign]
    queue = WeightGradQueue()
    ctx, (column, row) = build(size, overlap, queue)
    assert isinstance(column, OverlappedColumnParallelLinear) == (overlap is not None)
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(S, B, H, generator=generator, dtype=torch.float64) for _ in range(2))
    own = x.chunk(size)[rank].clone().requires_grad_()
    if deferred:
        queue.begin(0)
    out, forward = counted(size, lambda: row(column(own)))

    def run_backward() -> None:
        out.backward(grad.chunk(size)[rank])
        if deferred:
            queue.end()
            queue.run(0)

    _, backward = counted(size, run_backward)
    queue.assert_empty()
    assert own.grad is not None
    found = {"out": all_gather(out.detach(), ctx.tp), "dx": all_gather(own.grad, ctx.tp)}
    for name, layer in (("column", column), ("row", row)):
        for kind, parameter in layer.named_parameters():
            whole = parameter.main_grad if parameter.grad is None else parameter.grad
            found[f"{name} {kind}"] = all_gather(whole[None].clone(), ctx.tp)
    return found, (forward, backward)


def counted(size: int, run: Callable[[], Any]) -> tuple[Any, Fraction]:
    """Return the result of `run` and the number of bytes that it sends in collectives and in point-to-point
    messages."""
    start, sent = dist.batch_isend_irecv, []

    def counting(operations: list[dist.P2POp]) -> Any:
        sent.extend(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend)
        return start(operations)

    dist.batch_isend_irecv = counting
    try:
        with recorded() as calls:
            result = run()
    finally:
        dist.batch_isend_irecv = start
    return result, ring_bytes(calls, size) + sum(sent)


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize(("overlap", "fallback"), [("ring", False), ("symmetric", True)])
@pytest.mark.parametrize("size", [2, 4])
def test_overlapped_layers_agree_and_send_the_same_bytes(
    size: int, overlap: str, fallback: bool, deferred: bool
) -> None:
    """The test uses torch's symmetric-memory operations or the fallbacks that torch's own tests use. Each pass through
    the two layers needs one gather and one reduction. The weight gradient of the first layer needs another gather of
    the layer's input."""
    plain = run_world(size, run_layers, None, deferred)
    overlapped = run_world(size, run_layers, overlap, deferred, fallback)
    part = Fraction(size - 1, size) * S * B * H * 8
    for (expected, sent), (found, also_sent) in zip(plain, overlapped, strict=True):
        torch.testing.assert_close(expected, found, rtol=1e-13, atol=1e-12)
        assert sent == (2 * part, 3 * part)
        assert fallback or also_sent == sent


def test_missing_symmetric_memory_is_reported_at_startup() -> None:
    config = parse_args(RUN)
    (check,) = [each for each in Parts().with_registered(config).callbacks if isinstance(each, SymmetricMemory)]
    with pytest.raises(ValueError, match=r"access each other's memory, but tensor-parallel ranks 0 lack these"):
        check.on_setup(Runtime(Launch(), torch.device("cpu"), ParallelState()))
