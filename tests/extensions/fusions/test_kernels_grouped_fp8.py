"""Tests of Triton kernels for experts in fp8, run in Triton's interpreter. Casts along tokens equal their plain-torch
version bit for bit, and GEMMs are compared with fp64 GEMMs of the same values. The compiled GPU code and the choice
between kernels are also tested."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron.core.moe.grouped_gemms import Segments, add_each_product_
from megatron.core.parallel_state import Axis
from megatron.extensions.speed.fp8 import grouped
from megatron.extensions.speed.fp8.blockwise import cast_by_blocks
from megatron.extensions.speed.fp8.casts import E4M3, TILE, Scaled
from megatron.extensions.speed.fp8.grouped import ExpertTiles, rows_of_tiles
from megatron.extensions.speed.fusions import grouped_fp8_choice as choices
from tests.extensions.fusions.test_kernels_grouped import SHAPES as BF16_SHAPES
from tests.extensions.fusions.test_kernels_grouped import mutated
from tests.triton_cases import apart, compiled, round_to_fp8_as_torch, same_bits, stack_of, stack_tool

SHAPES = (
    ([3, 0, 300, 1], 24, 40),
    ([0, 0, 0, 0], 16, 24),
    ([0, 17 * TILE], 16, 24),  # the weight gradient is a single tile, and the sum over its rows is split into parts
    ([129, 128], 40, 24),
)
"""Each case consists of the number of rows of each expert, the number of outputs and the number of inputs. Some of
these sizes are not multiples of a tile."""

ON_GPUS = (*SHAPES, ([0, 5000, 3, 9000], 304, 528), ([900] * 40, 272, 272))


def drawn(seed: int) -> Iterator[tuple[list[int], int, int]]:
    """Yield the cases of `SHAPES` and a random case."""
    yield from SHAPES
    draw = random.Random(seed)
    counts = [draw.choice((0, 1, 100, 128, 200)) for _ in range(draw.randint(1, 5))]
    yield counts, 8 * draw.randint(1, 7), 8 * draw.randint(1, 7)


def segments_of(counts: list[int]) -> tuple[Segments, Tensor]:
    """Return the ranges of rows of the experts, and the tile number at which each range ends."""
    segments = Segments.of_counts(torch.tensor(counts), True)
    return segments, segments.padded(TILE).ends // TILE


def rows_of(counts: list[int], width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return rows with values of many magnitudes, followed by rows that belong to no expert and contain the largest
    values."""
    x = torch.randn(sum(counts) + 5, width) * torch.exp(3 * torch.randn(sum(counts) + 5, width))
    x[sum(counts) :] = 1e30
    return x.to(dtype)


def check_casts(kernels: ModuleType, device: str = "cpu", seed: int = 0) -> None:
    """Assert that the kernels cast exactly as torch does, including non-finite values."""
    for number, (counts, _, width) in enumerate(drawn(seed)):
        torch.manual_seed(number)
        (segments, tile_ends), x = segments_of(counts), rows_of(counts, width)
        if sum(counts):
            x[0, 0], x[sum(counts) - 1, 1], x[sum(counts) // 2 - 2, 2] = torch.nan, torch.inf, -9.2e-41
        expected = grouped.cast_along_tokens_twin(x, segments.ends, tile_ends)
        found = kernels.cast_along_tokens(*(part.to(device) for part in (x, segments.ends, tile_ends)))
        assert all(same_bits(one.cpu(), two) for one, two in zip(found, expected, strict=True)), (counts, width)


def check_sums(kernels: ModuleType, device: str = "cpu", tiling: str = "tiny", seed: int = 0) -> None:
    """Compare the weight gradient kernels with an fp64 reference. In the interpreter, four programs run with small
    tiles."""
    kernels.TILINGS["tiny"] = kernels.Tiling(16, 32, 1, warps=4, stages=2)
    for number, (counts, outputs, inputs) in enumerate(drawn(seed) if device == "cpu" else ON_GPUS):
        torch.manual_seed(number)
        segments, tile_ends = segments_of(counts)
        dy, x = (
            ExpertTiles(*grouped.cast_along_tokens_twin(rows_of(counts, width), segments.ends, tile_ends), sum(counts))
            for width in (outputs, inputs)
        )
        out = torch.randn(len(counts), outputs, inputs)
        expected = out.double()
        add_each_product_(expected, *(rows_of_tiles(each, torch.float64) for each in (dy, x)), segments.padded(TILE))
        own = out.to(device)
        kernels.add_grouped_fp8_(own, *(part.to(device) for part in (*dy[:2], *x[:2], tile_ends)), tiling)
        error = (own.cpu().double() - expected).norm() / expected.norm()
        assert error < (1e-6 if device == "cpu" else 1e-3), (counts, outputs, inputs, error)


def operands(counts: list[int], outputs: int, inputs: int, blocks: bool) -> tuple[Scaled, Scaled]:
    """Return random rows and expert matrices that are cast to fp8, with one scale per row or per block."""
    x, w = rows_of(counts, inputs), torch.randn(len(counts), outputs, inputs).bfloat16()
    if blocks:
        return cast_by_blocks(x, 1, E4M3), grouped.blocks_of(w)
    return grouped.cast_by_rows(x), grouped.cast_by_rows(w)


def check_rows(kernels: ModuleType, device: str = "cpu", tiling: str = "tiny", seed: int = 0) -> None:
    """Compare the kernels with fp64 GEMMs of the dequantized operands."""
    kernels.ROW_TILINGS["tiny"] = kernels.RowTiling(16, 32, TILE, 4, 2)
    for number, (counts, outputs, inputs) in enumerate(drawn(seed) if device == "cpu" else ON_GPUS):
        torch.manual_seed(number)
        segments, _ = segments_of(counts)
        for blocks in (False, True):
            a, b = operands(counts, outputs, inputs + 120 * blocks, blocks)
            dtype = torch.float32 if device == "cpu" else torch.bfloat16
            on_device = (part.to(device) for part in (*a, *b, segments.ends))
            y = kernels.multiply_rows(*on_device, dtype, tiling)[: sum(counts)].cpu().double()
            expected = torch.zeros_like(y)
            parts = zip(*(segments.split(each) for each in (expected, *a)), *b, strict=True)
            for out, values, scale, matrix, matrix_scale in parts:
                one, two = Scaled(values, scale), Scaled(matrix, matrix_scale)
                out += one.dequantized(torch.float64) @ two.dequantized(torch.float64).t()
            error = (y - expected).norm()
            assert error <= (1e-6 if device == "cpu" else 1e-2) * expected.norm(), (counts, outputs, inputs, blocks)


@apart(interpret=True)
def test_interpreted_casts_along_tokens_match_their_twin() -> None:
    from megatron.extensions.speed.fusions.kernels import grouped_fp8_triton

    round_to_fp8_as_torch()
    check_casts(grouped_fp8_triton)


@apart(interpret=True)
def test_an_interpreted_list_of_tiles_adds_each_product_in_fp8() -> None:
    from megatron.extensions.speed.fusions.kernels import grouped_fp8_triton

    check_sums(grouped_fp8_triton)


@apart(interpret=True)
def test_interpreted_products_of_rows_match_each_expert() -> None:
    from megatron.extensions.speed.fusions.kernels import grouped_fp8_triton

    check_rows(grouped_fp8_triton)


MUTANTS = (
    (check_casts, "of_tiles <= tile", "of_tiles < tile"),
    (check_casts, "(n < stop)[:, None] & (k < width)", "(n < stop + 1)[:, None] & (k < width)"),
    (check_casts, "& 0x7F800000", "& 0x7FC00000"),
    (check_sums, "dy_scale + step.to(tl.int64) * outputs + o", "dy_scale + o"),
    (check_sums, "n = step * TILE", "n = (end - 1) * TILE"),
    (check_sums, "in_o, in_i = o < outputs, i < inputs", "in_o, in_i = o < outputs, i < outputs"),
    (check_rows, "of_rows <= tile", "of_rows < tile"),
    (check_rows, "column // BLOCK_K) * steps", "column // BLOCK_K)"),
    (check_rows, "(n < stop)[:, None] & (o < outputs)", "(n < stop - 1)[:, None] & (o < outputs)"),
    (check_rows, "used = k < terms - step * BLOCK_K", "used = k < terms"),
)


@apart(interpret=True)
def test_every_mutant_of_a_kernel_is_detected() -> None:
    from megatron.extensions.speed.fusions.kernels import grouped_fp8_triton

    round_to_fp8_as_torch()
    with TemporaryDirectory() as folder:
        for check, old, new in MUTANTS:
            try:
                check(mutated(grouped_fp8_triton, old, new, folder))
            except Exception:
                continue
            raise AssertionError(f"nothing finds {new} in place of {old}")


@apart(interpret=False)
def test_kernels_of_experts_in_fp8_compile_without_spills() -> None:
    """The kernels compile for L40S, H100 and B200 and fit into the shared memory of these GPUs. On Hopper, the kernels
    prefetch the operands of later loop iterations."""
    from megatron.extensions.speed.fusions.kernels import grouped_fp8_triton as kernels

    types = dict.fromkeys(("dy", "x", "w"), "*fp8e4nv") | dict.fromkeys(("dy_scale", "x_scale", "w_scale"), "*fp32")
    types |= {"out": "*fp32", "parts": "*fp32", "schedule": "*i32", "ends": "*i32", "y": "*bf16"}
    types |= dict.fromkeys(("outputs", "inputs", "tokens", "terms", "experts", "tiles", "programs"), "i32")
    for name, capability, room in (("shallow", 89, 99), ("square", 90, 227), ("square", 100, 227)):
        tiling, rows = kernels.TILINGS[name], kernels.ROW_TILINGS[name]
        how = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        sums = compiled(
            kernels.add_grouped_fp8_kernel, types, {**tiling.constants, "EXPERTS": 64, "TILE": TILE}, capability, **how
        )
        constants = {**rows.constants, "EXPERTS": 64, "TILED": False}
        products = compiled(kernels.row_products_kernel, types, constants, capability, **how)
        for built in (sums, products):
            assert built.metadata.shared <= room * 1024
            assert stack_tool() is None or stack_of(built) == 0, (name, capability)
        if capability == 90:
            assert "async_wait" in sums.asm["ttgir"] and "wgmma" in sums.asm["ptx"] and "wgmma" in products.asm["ptx"]
            assert "add.v4.f32" in sums.asm["ptx"]


def clock_of(*seconds: float) -> Callable[[Callable[[], object]], float]:
    left = iter(seconds)

    def clock(run: Callable[[], object]) -> float:
        run()
        return next(left)

    return clock


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_the_fastest_correct_kernel_is_chosen_by_shape(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is not chosen if its results are wrong or if it needs more shared memory than the GPU has. No kernel is
    chosen if torch is the fastest."""

    def add(out: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, ends: Tensor, tiling: str) -> None:
        one, two = (ExpertTiles(*each, 0) for each in ((dy, dy_scale), (x, x_scale)))
        grouped.add_products_of_tiles_(out, one, two, ends, torch.float32)
        out[-1, -1, -1] += 100.0 * (tiling == "square")
        if tiling == "small":
            raise RuntimeError("out of shared memory")

    def multiply(
        x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor, dtype: torch.dtype, tiling: str
    ) -> Tensor:
        plain = grouped.grouped_scaled_mm.__wrapped__  # type: ignore[attr-defined]
        segments = Segments(None, ends, ends.device, True)
        y: Tensor = plain(Scaled(x, x_scale), Scaled(w, w_scale), segments, dtype, False)
        return y * (2.0 if tiling == "flat" else 1.0)

    monkeypatch.setattr(choices, "_add", add)
    monkeypatch.setattr(choices, "_multiply", multiply)
    monkeypatch.setattr(choices, "_on_gpu", lambda shapes: True)
    shapes = replace(BF16_SHAPES, fp8=recipe, dtype=torch.bfloat16)
    (one, two), grads, rows = shapes.expert_matrices, choices.Fp8WeightGrads(), choices.Fp8RowProducts()
    assert grads.lost(shapes, Axis(), clock_of(0.3, 0.4, 0.2, 0.4)) is None
    assert grads.chosen == dict.fromkeys((one, two), "shallow")
    assert "square unavailable: RuntimeError: square is wrong by" in grads.found[one].times
    assert "small unavailable: RuntimeError: out of shared memory" in grads.found[two].times
    why = grads.lost(shapes, Axis(), clock_of(0.3, 0.1))
    assert why is not None and why.startswith(f"torch is the fastest for {one[0]} x {one[1]}")
    assert rows.lost(shapes, Axis(), None) is None, "nothing is timed"
    assert rows.chosen == dict.fromkeys((one, one[::-1], two, two[::-1]), "square")
    assert "flat unavailable" in rows.found[one].times
    assert next(choices.said({"products": rows})).startswith(f"kernel of products {one[0]} x {one[1]}: square")
