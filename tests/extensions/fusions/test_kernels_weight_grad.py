"""Tests of fp8 GEMMs that accumulate into their output. The Triton kernel is compared with its plain-torch definition.
Further tests cover the calls of cuBLASLt and the choice between the two implementations."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.param_meta import Init
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.linear_gemms import WeightCasts, residual_gemm
from megatron.core.tensor_parallel.linear_spec import ColumnLinear
from megatron.extensions.speed.fp8.build import Fp8Format
from megatron.extensions.speed.fp8.casts import E4M3, E5M2, Scaled
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fusions import gemm_choice
from megatron.extensions.speed.fusions.gemm_choice import ProductShape, WeightGradKernel
from megatron.extensions.speed.fusions.kernels import cublaslt
from tests.harness import tp_context
from tests.triton_cases import apart, compiled

CPU = torch.device("cpu")


def operand(rows: int, tokens: int, dtype: torch.dtype, scales: str) -> Scaled:
    size = {"matrix": (), "rows": (rows, 1), "tiles": (rows, -(-tokens // 128))}[scales]
    return Scaled(torch.randn(rows, tokens).to(dtype), torch.rand(size) + 0.5)


@apart(interpret=True)
def test_interpreted_sums_match_the_definition() -> None:
    """The sizes are not multiples of a tile, and there are more tiles than one group contains. In one case, the summed
    dimension is empty."""
    from triton import language as tl
    from triton.runtime import interpreter

    from megatron.extensions.speed.fusions.kernels import products_triton as kernels

    # Triton's interpreter multiplies only fp16 and fp32.
    formats = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}

    def dot(builder: object, a: object, b: object, total: object, precision: object, inexact: object) -> object:
        def numbers(x: object) -> Tensor:
            values = torch.from_numpy(x.data).view(formats[x.dtype.scalar])  # type: ignore[attr-defined]
            return values.to(torch.float32)

        sums = (numbers(a) @ numbers(b)).numpy() + total.data  # type: ignore[attr-defined]
        return interpreter.TensorHandle(sums, total.dtype.scalar)  # type: ignore[attr-defined]

    interpreter.InterpreterBuilder.create_dot = dot
    torch.manual_seed(2)
    for (o, i, n), scales in product(((130, 50, 300), (1100, 136, 64), (16, 256, 128)), ("matrix", "rows", "tiles")):
        a, b = operand(o, n, E5M2, scales), operand(i, n, E4M3, scales)
        out, over = torch.randn(o, i), torch.full((o, i), torch.nan)
        expected = out.double() + a.dequantized(torch.float64) @ b.dequantized(torch.float64).t()
        zeros = torch.zeros(o, i)
        kernels.add_product_triton_(out, a.values, b.values, a.scale, b.scale, False)
        kernels.add_product_triton_(zeros, a.values, b.values, a.scale, b.scale, False)
        kernels.add_product_triton_(over, a.values, b.values, a.scale, b.scale, overwrite=True)
        assert torch.equal(over, zeros)
        terms = a.dequantized(torch.float64).abs() @ b.dequantized(torch.float64).abs().t() + expected.abs()
        assert ((out.double() - expected).abs() <= (n + 8) * 2.0**-24 * terms).all(), (o, i, n, scales)
    out = torch.randn(16, 32)
    before, empty = out.clone(), torch.empty(16, 0).to(E4M3)
    kernels.add_product_triton_(out, empty, torch.empty(32, 0).to(E4M3), torch.ones(()), torch.ones(()), False)
    assert torch.equal(out, before)
    kernels.add_product_triton_(out, empty, torch.empty(32, 0).to(E4M3), torch.ones(()), torch.ones(()), overwrite=True)
    assert not out.any()


@apart(interpret=False)
def test_the_kernel_compiles_for_hopper() -> None:
    """The kernel multiplies fp8 tiles with the wgmma instruction, which only Hopper has."""
    from megatron.extensions.speed.fusions.kernels import products_triton as kernels

    types = {"out": "*fp32", "b": "*fp8e4nv", **dict.fromkeys(("a_scale", "b_scale"), "*fp32")}
    types |= dict.fromkeys(("outputs", "inputs", "n"), "i32")
    for name, scales in product(("fp8e5", "fp8e4nv"), (kernels.OF_MATRIX, kernels.OF_ROWS, kernels.OF_TILES)):
        options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
        constants = kernels.TILE | {"SCALES": scales, "OVERWRITE": name == "fp8e5"}
        built = compiled(kernels.add_product_kernel, types | {"a": f"*{name}"}, constants, 90, **options)
        a_format = "e5m2" if name == "fp8e5" else "e4m3"
        assert f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{a_format}.e4m3" in built.asm["ptx"]
        reads_sums = "ld.global.v4.b32" in built.asm["ptx"]
        assert reads_sums != constants["OVERWRITE"] and "st.global.v4.b32" in built.asm["ptx"]
        assert built.metadata.shared <= 227 * 1024


class CublasLt:
    """Replacement for cuBLASLt that works on CPU memory. The replacement computes D = alpha scale_A scale_B op(A) op(B)
    + beta C for column-major matrices."""

    def __init__(self) -> None:
        self.objects: list[dict[Any, Any]] = [{}]

    def new(self, handle: Any, **content: Any) -> int:
        self.objects.append(content)
        handle._obj.value = len(self.objects) - 1
        return 0

    def cublasLtCreate(self, handle: Any) -> int:
        return self.new(handle)

    def cublasLtMatmulDescCreate(self, handle: Any, compute: Any, scale: Any) -> int:
        assert (compute.value, scale.value) == (68, 0), "CUBLAS_COMPUTE_32F and CUDA_R_32F"
        return self.new(handle)

    def cublasLtMatmulPreferenceCreate(self, handle: Any) -> int:
        return self.new(handle)

    def cublasLtMatmulPreferenceDestroy(self, handle: Any) -> int:
        return 0

    def cublasLtMatrixLayoutCreate(self, handle: Any, kind: Any, rows: Any, columns: Any, leading: Any) -> int:
        return self.new(handle, kind=kind.value, size=(rows.value, columns.value), leading=leading.value)

    def cublasLtMatmulDescSetAttribute(self, target: Any, attribute: Any, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[target.value][attribute.value] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, *args: Any) -> int:
        preference, count, found = self.objects[args[5].value], args[6], args[8]
        assert all(preference[alignment] == 16 for alignment in range(5, 9)) and count.value == 1
        found._obj.value = 1
        return 0

    def matrix(self, layout: Any, address: Any) -> Tensor:
        """Return a view of the column-major matrix at an address."""
        found = self.objects[layout.value]
        dtype = {0: torch.float32, 14: torch.bfloat16, 28: E4M3, 29: E5M2}[found["kind"]]
        (rows, columns), leading = found["size"], found["leading"]
        count = leading * columns * dtype.itemsize
        memory = (ctypes.c_uint8 * count).from_address(address.value)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        return flat.view(columns, leading)[:, :rows].t()

    def cublasLtMatmul(self, handle: Any, product: Any, alpha: Any, *args: Any) -> int:
        a, b, c, d = (self.matrix(args[i + 1], args[i]) for i in (0, 2, 5, 7))
        beta, settings = args[4]._obj.value, self.objects[product.value]
        fp8 = a.dtype.itemsize == 1
        assert settings.get(25) == {(True, 0): 0, (True, 14): 1}.get((fp8, self.objects[args[8].value]["kind"]))
        scales = [ctypes.c_float.from_address(settings[key]).value if fp8 else 1.0 for key in (17, 18)]
        a, b = (x.float() * scale for x, scale in zip((a, b), scales, strict=True))
        product = (a.t() if settings.get(3) else a) @ (b.t() if settings.get(4) else b)
        if settings.get(7):
            assert (settings[7], settings[26]) == (4, 14), "CUBLASLT_EPILOGUE_BIAS and CUDA_R_16BF"
            memory = (ctypes.c_uint8 * (2 * len(d))).from_address(settings[8])
            product += torch.frombuffer(memory, dtype=torch.bfloat16)[:, None]
        d.copy_(alpha._obj.value * product + beta * c)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace cuBLASLt, which needs a GPU, with a Python implementation that follows cuBLASLt's documentation."""
    monkeypatch.setattr(cublaslt, "_library", _one(CublasLt()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    torch.manual_seed(4)
    for made in (cublaslt._handle, cublaslt._prepared):
        made.cache_clear()
    yield
    for made in (cublaslt._handle, cublaslt._prepared):
        made.cache_clear()


def test_cublaslt_calls_match_the_definition(library: None) -> None:
    for o, i, n in ((48, 32, 64), (16, 80, 32), (48, 32, 64)):
        a, b = operand(o, n, E5M2, "matrix"), operand(i, n, E4M3, "matrix")
        out = torch.randn(o, i)
        product = a.dequantized() @ b.dequantized().t()
        expected = out + product
        cublaslt.add_product_cublaslt_(out, a.values, b.values, a.scale, b.scale, False)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
        cublaslt.add_product_cublaslt_(out, a.values, b.values, a.scale, b.scale, overwrite=True)
        torch.testing.assert_close(out, product, rtol=1e-5, atol=1e-4)
    rows = operand(o, n, E5M2, "rows")
    with pytest.raises(RuntimeError, match="each fp8 operand must have one scale"):
        cublaslt.add_product_cublaslt_(out, rows.values, b.values, rows.scale, rows.scale, False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_cublaslt_adds_products_to_a_residual_stream(fp8: bool, bias: bool, library: None) -> None:
    for n, m, k in ((48, 32, 64), (16, 80, 32), (48, 32, 64)):
        x, weight = operand(n, k, E4M3, "matrix"), operand(m, k, E4M3, "matrix")
        scales = (x.scale, weight.scale) if fp8 else None
        factors = (x.values, weight.values) if fp8 else (torch.randn(n, k).bfloat16(), torch.randn(m, k).bfloat16())
        addend, of_bias = torch.randn(n, m).bfloat16(), torch.randn(m).bfloat16() if bias else None
        before = addend.clone()
        found = cublaslt.residual_product(*factors, addend, of_bias, scales)
        expected = residual_gemm(*factors, addend, of_bias, scales)
        torch.testing.assert_close(found, expected, rtol=2.0**-8, atol=1e-6)
        assert torch.equal(addend, before)
    with pytest.raises(RuntimeError, match="aligned"):
        cublaslt.residual_product(*factors, torch.empty(m, n).bfloat16().t(), of_bias, scales)


def _one(library: CublasLt) -> Callable[[], CublasLt]:
    return lambda: library


def test_the_fastest_correct_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers with the same tensor shapes use the same kernel. The Triton kernel is not a candidate on a CPU,
    because it has no CPU version."""
    config = Fp8Flags(fp8_format="hybrid", fp8_recipe="tensorwise")
    ctx = tp_context(ParallelState(), False, torch.bfloat16, format=Fp8Format(config, range(1), WeightCasts()))
    sizes = ((16, 32), (32, 16), (16, 32))
    layers = (ColumnLinear(f"l{n}", i, (o,), False, init=Init("zeros")) for n, (o, i) in enumerate(sizes))
    net = nn.ModuleList([ColumnParallelLinear(layer, ctx) for layer in layers])
    right = gemm_choice.add_product_

    def add(kernel: str, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool = False) -> None:
        right("triton" if kernel == "triton" else "torch", out, dy, x, overwrite)
        if kernel == "cublaslt" and out.shape == (32, 16):
            out[-1, -1] += 100.0

    monkeypatch.setattr(gemm_choice, "add_product_", add)
    seconds = iter([0.1, 0.2, 0.3])

    def clock(run: Callable[[], object]) -> float:
        run()
        return next(seconds)

    found = gemm_choice.choose_weight_grads([net], 64, "tensorwise", Axis(), CPU, clock)
    small, large = ProductShape(16, 32, 64), ProductShape(32, 16, 64)
    assert list(found) == [small, large]
    inf = float("inf")
    assert found[small].seconds == {"triton": inf, "cublaslt": 0.1, "torch": 0.2}
    assert "triton unavailable: NotImplementedError: Could not run" in found[small].times
    assert found[large].seconds == {"triton": inf, "cublaslt": inf, "torch": 0.3}
    assert "cublaslt adds wrong sums, with a relative error of" in found[large].errors["cublaslt"]
    assert gemm_choice.WEIGHT_GRADS.chosen == {small: "cublaslt", large: "torch"}
    gemm_choice.WEIGHT_GRADS.chosen.clear()


def test_unsupported_sums_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_choice, "runs_triton", lambda out: True)
    dy, x = operand(16, 32, E5M2, "matrix"), operand(8, 32, E4M3, "matrix")
    memory = torch.zeros(16 * 8 + 8)
    aligned, odd = (memory[start : start + 16 * 8].view(16, 8) for start in (0, 1))
    sums = aligned, odd, torch.zeros(8, 16).t(), torch.zeros(16, 8, dtype=torch.bfloat16)
    for chosen, taken in (("cublaslt", 1), ("triton", 2), ("torch", 0)):
        kernel = WeightGradKernel({ProductShape(16, 8, 32): chosen})
        assert [kernel.suits(out, dy, x, False) for out in sums] == [n < taken for n in range(4)]
    assert WeightGradKernel().suits(odd, dy, x, False), "the Triton kernel if nothing was timed"


def test_operands_in_16_bits_and_in_fp8_are_added_to_the_residual_stream() -> None:
    with FakeTensorMode():
        for dtype, fits in ((torch.bfloat16, True), (torch.float16, True), (E4M3, True), (torch.float32, False)):
            assert gemm_choice.adds_residual(None, torch.empty(32, 64, dtype=dtype, device="cuda")) == fits
        assert not gemm_choice.adds_residual(None, torch.empty(40, 64, dtype=E4M3, device="cuda"))
