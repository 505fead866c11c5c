"""fp8 GEMMs of experts against one product of dequantized operands for each expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.moe.experts import Segments, add_each_product_
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.linear_gemms import Cuts, WeightCasts
from megatron.extensions.fp8.casts import E4M3
from megatron.extensions.fp8.flags import Fp8Flags
from megatron.extensions.fp8.grouped import Fp8GroupedGemms, has_grouped_fp8_kernel
from megatron.extensions.fp8.recipes import Fp8Context
from tests.extensions.fp8.test_gemms import by_rows, fp64, in_blocks

CPU = torch.device("cpu")
SIZES = (37, 0, 16, 11)
SPARE = 5
IN, OUT = 144, 160


def in_fp8(x: Tensor, blockwise: bool, rows: int = 1) -> Tensor:
    """x [n, k] cast by rows, or by blocks of `rows` x 128 with multipliers that are powers of two. fp64."""
    return in_blocks(x, rows, E4M3) if blockwise and len(x) else fp64(by_rows(x, E4M3))


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_each_row_meets_the_matrix_of_its_expert(recipe: str) -> None:
    torch.manual_seed(2)
    x, dy = (torch.randn(sum(SIZES) + SPARE, width).bfloat16() for width in (IN, OUT))
    weight = torch.randn(len(SIZES), 2, OUT // 2, IN).bfloat16()
    casts, blocks = WeightCasts(), recipe == "blockwise"
    context = Fp8Context(Fp8Flags(fp8_format="hybrid", fp8_recipe=recipe), range(1), casts)
    gemms = Fp8GroupedGemms(context, Axis(), Cuts(), False, False, add_each_product_)
    segments = Segments.of_counts(torch.tensor(SIZES), spare=True)
    with casts.kept():
        for _ in range(2):
            y, dx = gemms.forward(x, weight, segments), gemms.input_grad(dy, weight, segments)
        kept = casts.nbytes
    scales = 2 * 2 * 2 if blocks else OUT + IN
    assert kept == len(SIZES) * (2 * OUT * IN + 4 * scales), "each weight is kept twice, by rows and by columns"
    assert y.dtype == dx.dtype == torch.bfloat16
    assert not y[sum(SIZES) :].any() and not dx[sum(SIZES) :].any(), "spare rows"
    matrices = weight.flatten(1, 2)
    for expert, (rows, d_rows) in enumerate(zip(segments.split(x), segments.split(dy), strict=True)):
        for found, a, b in (
            (segments.split(y)[expert], rows, matrices[expert]),
            (segments.split(dx)[expert], d_rows, matrices[expert].t()),
        ):
            a8, b8 = in_fp8(a, blocks), in_fp8(b, blocks, 128 if blocks else 1)
            room = 2.0**-20 * (a8.abs() @ b8.abs().t())
            error = (found.double() - a8 @ b8.t()).abs()
            assert (error <= room + 2.0**-8 * (a8 @ b8.t()).abs()).all(), expert
    assert gemms.forward(x[:0], weight, Segments.of_sizes([0] * 4, CPU)).shape == (0, OUT)


def test_gpus_with_a_kernel_for_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, found in (((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_grouped_fp8_kernel("delayed", gpu) == found
        assert not has_grouped_fp8_kernel("blockwise", gpu)
