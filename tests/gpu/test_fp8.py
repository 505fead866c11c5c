"""Tests of fp8 on GPUs. Every GEMM is compared with a GEMM of the dequantized operands. Training in fp8 is compared
with training in bf16 and with fp8 training on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.apart import assert_agrees, multiplies_in_fp8
from tests.gpu.test_training import EXPERTS, gradient_norms, losses

pytestmark = pytest.mark.skipif(not multiplies_in_fp8(), reason="needs a GPU of compute capability 8.9 or above")

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")

PRODUCTS = """
import torch
from torch import nn
from megatron.core.parallel_state import Axis
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fp8 import casts as fp8
from megatron.extensions.speed.fp8.casts import amax_of, amax_of_rows_and_columns, cast_transpose
from megatron.extensions.speed.fp8.casts import CastOrder, cast_transpose_noting_amax
from megatron.core.tensor_parallel.layers import LOCAL, LinearFunction
from megatron.core.tensor_parallel.linear_gemms import Cuts
from megatron.extensions.speed.fp8.build import Fp8Format
from megatron.extensions.speed.fp8.grouped import Fp8GroupedGemms, has_grouped_fp8_kernel
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.moe.grouped_gemms import Segments, add_each_product_
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue

torch.manual_seed(1)


def layer(recipe, name, device, compiled, x, w, b, dy):
    context = Fp8Format(Fp8Flags(fp8_format=name, fp8_recipe=recipe), range(1), WeightCasts())
    gemms = context.linear("linear", Axis(), Cuts(), torch.device(device), compiled)
    x, w, b = (value.to(device).detach().requires_grad_() for value in (x, w, b))
    w.main_grad = torch.zeros(w.shape, device=device)
    queue = WeightGradQueue()
    y = LinearFunction.apply(x, w, b, LOCAL, Axis(), queue, gemms)
    y.backward(dy.to(device))
    return {"y": y.detach(), "dx": x.grad, "dw": w.main_grad, "db": b.grad}


x, w, b, dy = (torch.randn(shape).bfloat16() for shape in ((128, 2, 384), (4, 96, 384), (4, 96), (128, 2, 384)))
blocks = ("blockwise",) if torch.cuda.get_device_capability()[0] == 9 else ()  # on Hopper alone
for recipe in ("tensorwise", "delayed", "rowwise", *blocks):
    for name in ("hybrid", "e4m3"):
        plain = layer(recipe, name, "cpu", False, x, w, b, dy)
        for compiled in (False, True):
            for key, value in layer(recipe, name, "cuda", compiled, x, w, b, dy).items():
                error = ((value.cpu().double() - plain[key].double()).norm() / plain[key].double().norm()).item()
                # The same casts; sums in another order, in Hopper's forward to 14 bits or so, rounded to bf16.
                assert error < 0.01, (recipe, name, compiled, key, error)

def experts(recipe, device, compiled, x, w, dy):
    context = Fp8Format(Fp8Flags(fp8_format="hybrid", fp8_recipe=recipe), range(1), WeightCasts())
    device, one = torch.device(device), has_grouped_fp8_kernel(recipe, torch.device(device))
    gemms = Fp8GroupedGemms(context, Axis(), Cuts(), one, compiled, add_each_product_)
    segments = Segments.of_counts(torch.tensor([50, 0, 37, 9], device=device), spare=True)
    x, w, dy = (value.to(device) for value in (x, w, dy))
    dw = torch.zeros(w.flatten(1, 2).shape, device=device)
    gemms.add_weight_grad_(dw, dy, x, segments)
    return {"y": gemms.forward(x, w, segments), "dx": gemms.input_grad(dy, w, segments), "dw": dw}


x, w, dy = (torch.randn(shape).bfloat16() for shape in ((100, 256), (4, 2, 96, 256), (100, 192)))
for recipe in ("delayed", *blocks):
    plain = experts(recipe, "cpu", False, x, w, dy)
    for compiled in (False, True):
        for key, value in experts(recipe, "cuda", compiled, x, w, dy).items():
            error = ((value.cpu().double() - plain[key].double()).norm() / plain[key].double().norm()).item()
            assert error < 0.01 and (key == "dw" or not value[96:].any()), (recipe, compiled, key, error)

bad = torch.randn(32, 64).bfloat16().cuda()
bad[3, 5] = torch.inf
good = torch.randn(32, 64).bfloat16().cuda()


def by_rows(pair):
    return fp8.Scaled(pair.rows, pair.row_scale)


def cast_by_rows(x):
    return by_rows(cast_transpose(x, amax_of_rows_and_columns(x, (True, False), False)[0], None, fp8.E4M3, False))


weight = by_rows(cast_transpose(good, amax_of(good), None, fp8.E4M3, False))
for pair in (
    cast_transpose(bad, amax_of(bad), None, fp8.E4M3, False),
    cast_transpose_noting_amax(
        bad, CastOrder(torch.ones((), device="cuda"), None, (True, False), fp8.E5M2), False
    ),
):
    assert not fp8.scaled_mm(by_rows(pair), weight, torch.bfloat16).isfinite().any()
rows = fp8.scaled_mm(cast_by_rows(bad), cast_by_rows(good), torch.bfloat16)
assert not rows[3].isfinite().any() and rows[4:].isfinite().all()
print("agree")
"""


def test_gemms_match_the_cpu() -> None:
    assert_agrees(PRODUCTS)


KERNELS = """
from itertools import product
import torch
from megatron.extensions.speed.fusions.gemm_choice import ProductShape, weight_grad_runs
from tests.extensions.fusions.test_kernels_cast import FORMATS, WANTED, check_operators, matrices

for x, dtype, wanted in product(matrices(), FORMATS, WANTED):
    check_operators(x.cuda(), dtype, wanted)
for recipe in ("delayed", "rowwise", "blockwise"):
    for shape in (ProductShape(384, 256, 512), ProductShape(144, 1040, 192)):
        runs = weight_grad_runs(shape, torch.float8_e5m2, recipe, torch.device("cuda"))
        for name in ("triton", "torch", *(["cublaslt"] if recipe == "delayed" else [])):
            runs[name]()  # compares its sums
print("agree")
"""


def test_kernels_match_their_twins() -> None:
    assert_agrees(KERNELS)


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("bf16") / "metrics.jsonl", 1, "--bf16")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["", "--no-compile"])
def test_losses_are_near_those_of_bf16(recipe: str, how: str, in_bf16: list[float], tmp_path: Path) -> None:
    flags = ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe, *how.split()]
    assert losses(tmp_path / "metrics.jsonl", 1, *flags) == pytest.approx(in_bf16, rel=2e-2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "model", ["", "--normalization LayerNorm", " ".join(EXPERTS)], ids=["llama", "norm", "experts"]
)
def test_each_parameter_has_nearly_the_gradient_of_fp32(recipe: str, model: str, tmp_path: Path) -> None:
    on_cpu = gradient_norms(tmp_path / "cpu.jsonl", *model.split(), "--cpu")
    flags = [*model.split(), "--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe]
    assert gradient_norms(tmp_path / "fp8.jsonl", *flags) == pytest.approx(on_cpu, rel=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", ["--tp 2 --sequence-parallel", "--pp 2 --pipeline-schedule zb-h1", "--dp 2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layouts_over_nccl_match_one_process(recipe: str, layout: str, in_bf16: list[float], tmp_path: Path) -> None:
    widths = "--ffn-hidden-size 768" if recipe == "blockwise" else ""  # with this width, no tile spans two ranks
    flags = ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe, *layout.split(), *widths.split()]
    assert losses(tmp_path / "metrics.jsonl", 2, *flags) == pytest.approx(in_bf16, rel=2e-2)
