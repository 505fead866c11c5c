"""In plans for GPUs, tiled attention returns fake outputs. The fake outputs have the same shapes as the outputs that
plain torch computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.attention.backends import AttentionOperands
from megatron.core.attention.tile_kernels import Rows, TorchKernel
from megatron.core.attention.tiles import Tile, causal_tiles, joined, rank_spans
from megatron.extensions.plan.planner.as_on_gpus import FakeKernel, PlannedGPU
from megatron.extensions.plan.planner.live_memory import LiveMemory

ROWS, SAMPLES, HEADS, GROUPS, WIDTH = 32, 2, 4, 2, 16
CPU = torch.device("cpu")


def operands(value_width: int) -> list[Tensor]:
    """Return the output gradient, q, k and v."""
    shapes = (HEADS, value_width), (HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, value_width)
    return [torch.randn(ROWS, SAMPLES, *shape).bfloat16() for shape in shapes]


def tiles_of(name: str) -> tuple[Tile, ...]:
    """Return attention tiles, either for a whole sample on one rank, or for one step of ring attention on the first of
    two ranks."""
    spans = {
        "whole": (range(ROWS),),
        "own keys": rank_spans(2 * ROWS, 0, 2),
        "others' keys": rank_spans(2 * ROWS, 1, 2),
    }
    return joined(causal_tiles(spans["whole" if name == "whole" else "own keys"], spans[name], None, None))


@pytest.mark.parametrize("value_width", [WIDTH, WIDTH // 2])
@pytest.mark.parametrize("name", ["whole", "own keys", "others' keys"])
def test_planned_tensors_have_the_shapes_of_computed_ones(name: str, value_width: int) -> None:
    grad, q, k, v = operands(value_width)
    kernel, _ = PlannedGPU().attention("auto", AttentionOperands(0.25, q.dtype, CPU, WIDTH, value_width)).tiles()
    tiles, plain = tiles_of(name), TorchKernel(0.25)
    rows = Rows(grad, grad, torch.zeros(ROWS, SAMPLES, HEADS))
    for found, computed in (
        (kernel.forward(q, k, v, tiles), plain.forward(q, k, v, tiles)),
        (kernel.backward(rows, q, k, v, tiles), plain.backward(rows, q, k, v, tiles)),
    ):
        planned = {tile: [(x.shape, x.dtype) for x in tensors] for tile, tensors in found}
        assert planned == {tile: [(x.shape, x.dtype) for x in tensors] for tile, tensors in computed}


def test_whole_samples_need_no_copies_and_parts_are_packed() -> None:
    _, q, k, v = operands(WIDTH)
    kernel, _ = PlannedGPU().attention("auto", AttentionOperands(0.25, q.dtype, CPU, WIDTH, WIDTH)).tiles()
    outputs = q.numel() * 2 + q.numel() // WIDTH * 4  # size in bytes of the bf16 outputs and the fp32 log-sum-exps
    made = {}
    for name in ("whole", "own keys"):
        with LiveMemory() as live:
            list(kernel.forward(q, k, v, tiles_of(name)))
            made[name] = live.peak
    packed = 2 * (q.numel() + k.numel() + v.numel())
    assert made["whole"] == outputs and made["own keys"] > outputs + packed // 2


def test_unsupported_shapes_are_planned_as_plain_torch() -> None:
    plain = ("unfused", torch.bfloat16, 16), ("auto", torch.float32, 16), ("auto", torch.bfloat16, 12)
    for backend, dtype, width in plain:
        operands = AttentionOperands(0.25, dtype, CPU, width, width)
        assert type(PlannedGPU().attention(backend, operands).tiles()[0]) is TorchKernel
    operands = AttentionOperands(0.25, torch.float16, CPU, 16, 16)
    assert isinstance(PlannedGPU().attention("flash", operands).tiles()[0], FakeKernel)
