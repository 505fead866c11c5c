"""Tests of the planned GEMMs of experts: one kernel for all experts, or one kernel per expert."""

from __future__ import annotations

from inspect import unwrap

import pytest
import torch

from megatron.core.moe.grouped_gemms import Segments, add_products_grouped_
from megatron.extensions.plan.planner.time import expert_products
from megatron.extensions.plan.planner.time.events import Product
from megatron.extensions.plan.planner.time.expert_products import PLANNED, planned_expert_products
from megatron.extensions.plan.planner.time.recorder import Recorder
from megatron.extensions.speed.fp8.casts import E4M3, TILE, Scaled
from megatron.extensions.speed.fp8.grouped import ExpertTiles, add_fp8_products_grouped_, grouped_scaled_mm

EXPERTS, ROWS, OUT, IN = 4, 64, 48, 32
SEGMENTS = Segments.of_sizes([ROWS // EXPERTS] * EXPERTS, torch.device("cpu"))
SUMS = 2 * 4 * EXPERTS * OUT * IN


def test_grouped_gemms_are_one_event() -> None:
    recorder = Recorder(fp32_sums=True, backend="auto")
    planned = planned_expert_products(recorder)
    rows = Scaled(torch.empty(ROWS, IN, dtype=E4M3), torch.empty(ROWS, 1))
    matrices = Scaled(torch.empty(EXPERTS, OUT, IN, dtype=E4M3), torch.empty(EXPERTS, OUT, 1))
    y = planned[unwrap(grouped_scaled_mm)](rows, matrices, SEGMENTS, torch.bfloat16, True)
    assert isinstance(y, torch.Tensor) and y.shape == (ROWS, OUT) and y.dtype == torch.bfloat16
    out, dy, x = torch.empty(EXPERTS, OUT, IN), torch.empty(ROWS, OUT).bfloat16(), torch.empty(ROWS, IN).bfloat16()
    planned[unwrap(add_products_grouped_)](out, dy, x, SEGMENTS)
    tiles = (
        ExpertTiles(torch.empty(width, TILE * EXPERTS, dtype=E4M3), torch.empty(EXPERTS, width), ROWS)
        for width in (OUT, IN)
    )
    planned[unwrap(add_fp8_products_grouped_)](out, *tiles, SEGMENTS.padded(TILE).ends // TILE)
    each, moved = ROWS // EXPERTS, ROWS * (OUT + IN)
    assert recorder.take() == (
        Product("fp8", each, OUT, IN, EXPERTS, ROWS * IN + EXPERTS * OUT * IN + 2 * ROWS * OUT, expert=True),
        Product("bf16", OUT, IN, each, EXPERTS, 2 * moved, SUMS, expert=True),
        Product("fp8", OUT, IN, each, EXPERTS, moved, SUMS, expert=True),
    )


def test_unused_kernels_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a grouped kernel, the plan records one torch GEMM per expert."""
    recorder = Recorder(fp32_sums=True, backend="auto")
    monkeypatch.setattr(expert_products, "LEFT_OUT", {"grouped_scaled_mm", "add_fp8_products_grouped_"})
    found = planned_expert_products(recorder)
    assert len(found) == len(PLANNED) and found[unwrap(grouped_scaled_mm)] is unwrap(grouped_scaled_mm)
    tiles = [ExpertTiles(torch.zeros(32, TILE, dtype=E4M3), torch.zeros(1, 32), TILE)] * 2
    with recorder:
        found[unwrap(add_fp8_products_grouped_)](torch.zeros(1, 32, 32), *tiles, torch.tensor([1], dtype=torch.int32))
    precisions = {event.precision for event in recorder.take() if isinstance(event, Product)}
    assert precisions == {"bf16"}, "without the kernel, GPUs multiply in 16 bits"
