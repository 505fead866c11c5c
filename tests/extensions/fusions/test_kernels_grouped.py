"""Tests of kernels for expert weight gradients. The kernels run in Triton's interpreter and are compared with one GEMM
per expert. The choice of a kernel is also tested."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest
import torch

from megatron.core.moe.grouped_gemms import Segments, add_each_product_
from megatron.core.parallel_state import Axis
from megatron.extensions.speed.fusions import grouped_choice
from megatron.extensions.speed.fusions.grouped_choice import GroupedWeightGrad
from megatron.extensions.speed.fusions.kernel_choice import RunShapes
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tests.tiny import TINY
from tests.triton_cases import apart, compiled, stack_of, stack_tool

CPU = torch.device("cpu")


def check_grouped(device: str = "cpu") -> None:
    from megatron.extensions.speed.fusions.kernels import products_triton as kernels

    dtypes = [(torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float16, torch.float16)]
    if device != "cpu":  # on GPUs, fp32 GEMMs would be computed in TF32
        dtypes = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]
    for counts, (dtype, main) in product(([3, 0, 70, 1], [0, 0, 0, 0], [130, 4, 0, 2]), dtypes):
        torch.manual_seed(0)
        segments = Segments.of_counts(torch.tensor(counts), True)
        rows = sum(counts) + 5
        dy, x = torch.randn(rows, 136, dtype=dtype), torch.randn(rows, 24, dtype=dtype)
        dy[sum(counts) :], x[sum(counts) :] = torch.nan, torch.nan
        out = torch.randn(4, 136, 24, dtype=main)
        expected = out.double()
        add_each_product_(expected, dy.double(), x.double(), segments)
        own_out, own_dy, own_x, ends = (part.to(device) for part in (out, dy, x, segments.ends))
        kernels.add_grouped_products_(own_out, own_dy, own_x, ends)
        tolerance = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[main]
        torch.testing.assert_close(own_out.cpu().double(), expected, rtol=tolerance, atol=tolerance)
        assert sum(counts) or torch.equal(own_out.cpu(), out)
        twin = Segments.of_counts(torch.tensor(counts), True).clear_spare_(x.clone())
        kernels.clear_rows_behind_(own_x, ends)
        assert torch.equal(own_x.cpu(), twin) and twin.isfinite().all()
        of_bias, factors = torch.zeros(4, 136, 1, dtype=main), twin[:, :1].contiguous()
        expected = torch.zeros_like(of_bias, dtype=torch.float64)
        add_each_product_(expected, dy.double(), factors.double(), segments)
        own_bias = of_bias.to(device)
        kernels.add_grouped_products_(own_bias, own_dy, factors.to(device), ends)
        torch.testing.assert_close(own_bias.cpu().double(), expected, rtol=tolerance, atol=2 * tolerance)


@apart(interpret=False)
def test_grouped_sums_compile() -> None:
    from megatron.extensions.speed.fusions.kernels import products_triton as kernels

    types = {"dy": "*bf16", "x": "*bf16", "ends": "*i32", **dict.fromkeys(("outputs", "inputs", "experts"), "i32")}
    types |= {"width": "i32"}
    for capability, main in product((80, 90), ("fp32", "bf16")):
        given = types | {"out": f"*{main}"}
        for constants in (kernels.GROUPED_TILE, kernels.GROUPED_TILE | {"inputs": 1}):
            built = compiled(kernels.add_products_kernel, given, constants, capability, num_warps=8)
            assert built.metadata.shared <= 160 * 1024, built.metadata.shared
            assert "inputs" in constants or "mma" in built.asm["ptx"]
        assert compiled(kernels.clear_rows_kernel, types, {"BLOCK": kernels.CLEARED}, capability).asm["cubin"]


@apart(interpret=True)
def test_interpreted_grouped_sums_match_the_definition() -> None:
    check_grouped()


CASES = (
    ([3, 0, 70, 1], 24, 40),
    ([0, 0, 0, 0], 16, 24),
    ([0, 0, 600, 0], 16, 24),  # The weight gradient is one tile, whose sum over rows is split into four parts.
    ([290, 2, 0, 0], 20, 64),  # Each of two experts has one tile, whose sum over rows is split into two parts.
    ([40, 33, 32, 48, 17], 40, 40),
    ([9], 136, 64),  # the weight gradient has more rows of tiles than one group, whose tiles share operands
)
"""Each case consists of the number of rows of each expert, the number of outputs and the number of inputs. Some of
these sizes are not multiples of a tile."""


ON_GPUS = (*CASES, ([0, 5000, 3, 9000], 300, 520), ([900] * 40, 272, 264))
"""Cases for GPUs. Some sizes are not multiples of the tile size on GPUs."""


def check_list(kernels: ModuleType, device: str = "cpu", tiling: str = "tiny") -> None:
    """Compare the kernels with a plain-torch computation in fp64. The interpreter runs four programs and uses small
    tiles."""
    kernels.TILINGS["tiny"] = kernels.Tiling(16, 32, 16, warps=4, stages=2)
    dtype, off = (torch.float32, 1e-6) if device == "cpu" else (torch.bfloat16, 1e-5)
    for counts, outputs, inputs in CASES if device == "cpu" else ON_GPUS:
        torch.manual_seed(len(counts))
        segments = Segments.of_counts(torch.tensor(counts), True)
        rows = sum(counts) + 5
        dy, x = torch.randn(rows, outputs, dtype=dtype), torch.randn(rows, inputs, dtype=dtype)
        dy[sum(counts) :], x[sum(counts) :] = torch.nan, torch.nan
        out = torch.randn(len(counts), outputs, inputs)
        expected = out.double()
        add_each_product_(expected, dy.double(), x.double(), segments)
        own_out, own_dy, own_x, ends = (part.to(device) for part in (out, dy, x, segments.ends))
        again = own_out.clone()
        kernels.add_grouped_in_list_(own_out, own_dy, own_x, ends, tiling)
        if device != "cpu":
            kernels.add_grouped_in_list_(again, own_dy, own_x, ends, tiling)
            assert torch.equal(again, own_out), (counts, outputs, inputs)
        error = (own_out.cpu().double() - expected).norm() / expected.norm()
        assert error < off, (counts, outputs, inputs, error)


@apart(interpret=True)
def test_an_interpreted_list_of_tiles_adds_each_product() -> None:
    """The cases include experts without rows, an expert with almost all rows, partial tiles, and rows at the end that
    belong to no expert."""
    from megatron.extensions.speed.fusions.kernels import grouped_triton

    check_list(grouped_triton)


@apart(interpret=True)
def test_schedules_order_experts_and_split_the_last_tiles() -> None:
    from megatron.extensions.speed.fusions.kernels import grouped_triton as kernels

    def scheduled(counts: list[int], tiles: int, programs: int, slots: int) -> tuple[list[int], list[int]]:
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        schedule = torch.full((4 + 3 * len(counts),), -1, dtype=torch.int32)
        kernels.schedule_kernel[(1,)](schedule, ends, len(counts), tiles, programs, slots, 16, 64)
        head, order, starts, stops = schedule.split((4, *[len(counts)] * 3))
        numbers = order.tolist()
        assert starts.tolist() == [ends.tolist()[e] - counts[e] for e in numbers]
        assert stops.tolist() == [ends.tolist()[e] for e in numbers]
        return head.tolist(), numbers

    # The first list contains four numbers: experts without rows, unsplit tiles, split tiles, and parts per split tile.
    assert scheduled([64, 0, 6400, 640], 44, 132, 132) == ([1, 132, 0, 1], [1, 0, 3, 2])
    assert scheduled([64, 0, 6400, 640], 50, 132, 132) == ([1, 132, 18, 4], [1, 0, 3, 2])
    assert scheduled([0, 0, 6400, 0], 50, 132, 132) == ([3, 0, 50, 2], [0, 1, 3, 2])
    assert scheduled([0, 1, 6400, 0], 44, 132, 132)[0] == [2, 44, 44, 3], "all tiles of the longer expert"
    assert scheduled([0, 0, 6400, 0], 44, 132, 87)[0] == [3, 0, 44, 2], "no slots for three parts"
    assert scheduled([0, 0, 6400, 0], 166, 132, 132)[0] == [3, 132, 34, 3]
    assert scheduled([0, 0, 6400, 0], 100, 132, 132)[0] == [3, 100, 0, 1], "two parts take as long as an unsplit tile"
    assert scheduled([0, 0, 512, 0], 44, 132, 132)[0] == [3, 44, 0, 1], "parts would be too short"
    assert scheduled([0, 0, 6400, 0], 33 + 16 * 132, 132, 132)[0] == [3, 33 + 16 * 132, 0, 1], "many rounds"
    assert scheduled([0] * 4, 44, 132, 132)[0] == [4, 0, 0, 1]


MUTANTS = (
    ("tl.maximum(high - program, 0)", "tl.maximum(high - program - 1, 0)"),
    ("n[:, None] < end", "n[:, None] < end + 1"),
    ("order = (tl.sort(key) % EXPERTS).to(tl.int32)", "order = e"),
    ("part * steps // parts * BLOCK_N", "part * (steps // parts) * BLOCK_N"),
    ("for part in range(1, tl.load(schedule + PARTS))", "for part in range(2, tl.load(schedule + PARTS))"),
    ("slot = ((part - 1) * tail + place)", "slot = (part * tail + place)"),
    ("tl.where(e < experts, steps, last + 1)", "steps"),
    ("(group * 8 + place % height) * BLOCK_O", "(group * 8 + place % 8) * BLOCK_O"),
)


def mutated(module: ModuleType, old: str, new: str, folder: str) -> ModuleType:
    """Return a copy of the module in which the first occurrence of `old` is replaced by `new`. The copy is loaded from
    a separate file, because Triton reads source files."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert old in source, old
    path = Path(folder) / f"mutant_{abs(hash((old, new)))}.py"
    path.write_text(source.replace(old, new))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@apart(interpret=True)
def test_every_mutant_of_the_list_is_detected() -> None:
    from megatron.extensions.speed.fusions.kernels import grouped_triton

    with TemporaryDirectory() as folder:
        for old, new in MUTANTS:
            try:
                check_list(mutated(grouped_triton, old, new, folder))
            except Exception:
                continue
            raise AssertionError(f"nothing finds {new} in place of {old}")


@apart(interpret=False)
def test_the_list_compiles_without_spills_and_loads_ahead() -> None:
    """The kernel compiles for A100, H100 and B200. On Hopper, the kernel prefetches the operands of later loop
    iterations and adds tiles asynchronously."""
    from megatron.extensions.speed.fusions.kernels import grouped_triton as kernels

    numbers = ("outputs", "inputs", "experts", "tiles", "programs", "slots")
    types = {"dy": "*bf16", "x": "*bf16", "out": "*fp32", "parts": "*fp32", "ends": "*i32", "schedule": "*i32"}
    types |= dict.fromkeys(numbers, "i32")
    for name, capability in (("wide", 90), ("wide", 80), ("wide", 100)):
        tiling = kernels.TILINGS[name]
        constants = {**tiling.constants, "EXPERTS": 64}
        how = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        built = compiled(kernels.add_grouped_kernel, types, constants, capability, **how)
        assert built.metadata.shared * tiling.of_multiprocessor <= (227 if capability > 80 else 163) * 1024
        assert stack_tool() is None or stack_of(built) == 0, (name, capability)
        if capability == 90:
            ahead = re.findall(r"async_wait %.*num = (\d)", built.asm["ttgir"])
            assert ahead == [str(2 * (tiling.stages - 2))]
            assert "wgmma" in built.asm["ptx"] and "add.v4.f32" in built.asm["ptx"]
    for kernel, constants in (
        (kernels.schedule_kernel, {"EXPERTS": 64, "BLOCK_N": 64}),
        (kernels.add_parts_kernel, {**kernels.TILINGS["wide"].constants, "ROWS": kernels.ROWS}),
    ):
        assert compiled(kernel, types, constants, 90).asm["cubin"]


SHAPES = RunShapes.of(
    resolve(
        parse_args(
            f"{TINY} --hidden-size 32 --seq-length 64 --vocab-size 64 --micro-batch-size 2 --global-batch-size 2 "
            "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --swiglu --bf16 --cpu".split()
        ),
        1,
    ),
    CPU,
)


def test_kernels_are_timed_on_the_rows_and_matrices_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each matrix shape, the fastest correct kernel is used, or torch if it is faster than all kernels."""
    assert (SHAPES.expert_rows, SHAPES.expert_matrices) == (256, ((48, 32), (32, 24)))

    def add(kernel: str, out: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, segments: Segments) -> None:
        add_each_product_(out, dy.float(), x.float(), segments)
        if kernel == "tall" or (kernel == "wide" and dy.shape[1] == 32):
            out[-1, -1, -1] += 1.0
        if kernel == "small":
            raise RuntimeError("out of shared memory")

    monkeypatch.setattr(grouped_choice, "add_grouped_", add)
    monkeypatch.setattr(grouped_choice, "runs_triton", lambda x: True)

    def clock_of(*seconds: float) -> Callable[[Callable[[], object]], float]:
        left = iter(seconds)

        def clock(run: Callable[[], object]) -> float:
            run()
            return next(left)

        return clock

    grad = GroupedWeightGrad()
    assert grad.lost(SHAPES, Axis(), clock_of(0.1, 0.2, 0.4, 0.3, 0.4)) is None
    assert grad.chosen == {(48, 32): "wide", (32, 24): "tiles"}
    assert "tall unavailable: RuntimeError: tall adds wrong sums for" in grad.found[48, 32].times
    why = grad.lost(SHAPES, Axis(), clock_of(0.3, 0.25, 0.2, 0.1, 0.4))
    assert why is not None and why.startswith("torch is the fastest for 48 x 32: wide 300.00 ms")
    assert grad.lost(SHAPES, Axis(), None) is None, "nothing is timed"
    assert grad.chosen == {(48, 32): "wide", (32, 24): "tiles"}
    assert set(grad.found[48, 32].seconds) == {"wide", "tall", "small", "tiles"}


def test_sums_in_16_bits_and_other_shapes_are_added_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(grouped_choice, "add_grouped_", lambda kernel, *operands: used.append(kernel))
    grad = GroupedWeightGrad({(48, 32): "wide"})
    dy, x, segments = torch.zeros(0, 48), torch.zeros(0, 32), Segments.of_sizes([0], CPU)
    for out in (torch.zeros(1, 48, 32), torch.zeros(1, 48, 32).bfloat16(), torch.zeros(1, 48, 1)):
        grad(out, dy, x[:, : out.shape[2]], segments)
    assert used == ["wide", "tiles", "tiles"]
