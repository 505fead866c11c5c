"""Tests of fp8 weight gradients of experts. The reference is one GEMM per expert, whose operands are rounded to fp8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.moe.grouped_gemms import Segments, add_each_product_
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.linear_gemms import Cuts, WeightCasts
from megatron.extensions.speed.fp8 import grouped
from megatron.extensions.speed.fp8.build import Fp8Format
from megatron.extensions.speed.fp8.casts import E4M3, TILE
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fp8.grouped import Fp8GroupedGemms, cast_along_tokens, rows_of_tiles
from tests.extensions.fp8.test_gemms import in_blocks, spread

CPU = torch.device("cpu")
OUT, IN = 24, 40
COUNTS = ([3, 0, 300, 128], [0, 0, 0, 0], [129, 1], [256])
"""Row counts of the experts in each case. The cases include several tiles, exactly full tiles, and experts without
rows."""


def gemms() -> Fp8GroupedGemms:
    context = Fp8Format(Fp8Flags(fp8_format="hybrid", fp8_recipe="delayed"), range(1), WeightCasts())
    return Fp8GroupedGemms(context, Axis(), Cuts(), False, False, add_each_product_)


def operands(counts: list[int], spare: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an accumulated gradient and the operands dY and X. The last rows of dY and X, which belong to no expert,
    contain huge values that must not affect the result."""
    torch.manual_seed(sum(counts))
    rows = sum(counts) + spare
    dy, x = spread(rows, OUT), spread(rows, IN)
    dy[sum(counts) :], x[sum(counts) :] = 1e30, 1e30
    return torch.randn(len(counts), OUT, IN), dy, x


def rounded(x: Tensor) -> Tensor:
    """Round the rows of one expert to fp8 in tiles of 128 rows, and return the dequantized rows in fp64."""
    return in_blocks(x.t(), 1, E4M3).t() if len(x) else x.double()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("on_device", [True, False])
def test_gemms_match_rows_rounded_by_tiles_of_each_expert(counts: list[int], on_device: bool) -> None:
    spare = 5 if on_device else 0
    out, dy, x = operands(counts, spare)
    expected = out.double()
    segments = Segments.of_sizes(counts, CPU)
    for expert, one, other in zip(
        expected, segments.split(dy[: sum(counts)]), segments.split(x[: sum(counts)]), strict=True
    ):
        expert += rounded(one).t() @ rounded(other)
    gemms().add_weight_grad_(out, dy, x, Segments.of_counts(torch.tensor(counts), True) if on_device else segments)
    assert (out.double() - expected).norm() <= 1e-6 * expected.norm()


def distance_of_divisions() -> float:
    """Compute a weight gradient in two ways: from the rows of two ranks at once, and by adding up the gradients of each
    rank's rows. Return the relative distance between the two weight gradients."""
    torch.manual_seed(0)
    dy, x = torch.randn(200, OUT).bfloat16(), torch.randn(200, IN).bfloat16()
    at_once, by_rank = torch.zeros(1, OUT, IN), torch.zeros(1, OUT, IN)
    gemms().add_weight_grad_(at_once, dy, x, Segments.of_sizes([200], CPU))
    for part in (slice(90), slice(90, None)):
        gemms().add_weight_grad_(by_rank, dy[part], x[part], Segments.of_sizes([len(x[part])], CPU))
    return ((at_once - by_rank).norm() / at_once.norm()).item()


def test_the_assignment_of_tokens_to_tiles_changes_only_tiny_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fp8 scales of tiles are powers of two. If the scales were not powers of two, a different assignment of tokens
    to tiles would change every value."""
    assert distance_of_divisions() <= 1e-5
    monkeypatch.setattr(grouped, "power_of_two", lambda multiplier: multiplier)
    assert distance_of_divisions() >= 1e-2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_casts_propagate_non_finite_values(bad: float) -> None:
    """A non-finite value reaches only the weight gradient of the expert to which its row belongs."""
    out, dy, x = operands([130, 7], 0)
    x[129, 3] = bad
    gemms().add_weight_grad_(out, dy, x, Segments.of_sizes([130, 7], CPU))
    assert not out[0, :, 3].isfinite().any() and out[1].isfinite().all()
    assert out[0, :, [i for i in range(IN) if i != 3]].isfinite().all()


def test_the_cast_buffer_fits_any_assignment_of_rows() -> None:
    x = torch.randn(257, 16).bfloat16()
    for counts in ([1, 128, 128], [257, 0, 0], [129, 1, 127], [1, 1, 1]):
        segments = Segments.of_counts(torch.tensor(counts), True)
        tile_ends = segments.padded(TILE).ends // TILE
        made = cast_along_tokens(x, segments.ends, tile_ends, False)
        assert made.values.shape == (16, TILE * made.scale.shape[0]) and tile_ends[-1] <= made.scale.shape[0]
        rows, start = rows_of_tiles(made, torch.float32), 0
        for tile_end, one in zip(tile_ends.tolist(), segments.split(x), strict=True):
            assert torch.equal(rows[start : start + len(one)].double(), rounded(one))
            assert not rows[start + len(one) : TILE * tile_end].any()
            start = TILE * tile_end
