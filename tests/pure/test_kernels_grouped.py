"""Kernels of grouped products: Triton's interpreter, which multiplies no bf16, against the twins in torch, and compiled
for GPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest

INTERPRETED = """
import torch
from megatron.core.kernels import grouped_products_triton as kernels
from megatron.core.moe.experts import Segments, add_each_product_

for counts in ([3, 0, 70, 1], [0, 0, 0, 0], [130, 4, 0, 2]):
    for dtype, main in ((torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float16,) * 2):
        torch.manual_seed(0)
        segments = Segments.of_counts(torch.tensor(counts), True)
        rows = sum(counts) + 5
        dy, x = torch.randn(rows, 136, dtype=dtype), torch.randn(rows, 24, dtype=dtype)
        dy[sum(counts):], x[sum(counts):] = torch.nan, torch.nan
        out = torch.randn(4, 136, 24, dtype=main)
        expected = out.double()
        add_each_product_(expected, dy.double(), x.double(), segments)
        kernels.add_grouped_products_(out, dy, x, segments.ends)
        tolerance = 2**-10 if main == torch.float16 else 1e-5
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        assert sum(counts) or torch.equal(out.double(), expected)
        twin = Segments.of_counts(torch.tensor(counts), True).clear_spare_(x.clone())
        kernels.clear_rows_behind_(x, segments.ends)
        assert torch.equal(x, twin) and x.isfinite().all()
        of_bias, factors = torch.zeros(4, 136, 1, dtype=main), x[:, :1].contiguous()
        kernels.add_grouped_products_(of_bias, dy, factors, segments.ends)
        expected = torch.zeros_like(of_bias, dtype=torch.float64)
        add_each_product_(expected, dy.double(), factors.double(), segments)
        torch.testing.assert_close(of_bias.double(), expected, rtol=tolerance, atol=2 * tolerance)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron.core.kernels import grouped_products_triton as kernels

for capability in (80, 90):
    for main in ("fp32", "bf16"):
        types = {"out": f"*{main}", "dy": "*bf16", "x": "*bf16", "ends": "*i32", "outputs": "i32", "inputs": "i32"}
        source = ASTSource(kernels.add_products_kernel, types | dict.fromkeys(kernels.TILE, "constexpr"), kernels.TILE)
        built = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": 8})
        of_bias = ASTSource(
            kernels.add_products_kernel,
            types | dict.fromkeys((*kernels.TILE, "inputs"), "constexpr"),
            kernels.TILE | {"inputs": 1},
        )
        assert triton.compile(of_bias, GPUTarget("cuda", capability, 32), {"num_warps": 8}).asm["cubin"]
        assert "mma" in built.asm["ptx"] and built.metadata.shared <= 160 * 1024, built.metadata.shared
    types = {"x": "*bf16", "ends": "*i32", "experts": "i32", "width": "i32", "BLOCK": "constexpr"}
    source = ASTSource(kernels.clear_rows_kernel, types, {"BLOCK": kernels.CLEARED})
    assert triton.compile(source, GPUTarget("cuda", capability, 32)).asm["cubin"]
"""


@pytest.mark.parametrize(("script", "interpret"), [(INTERPRETED, "1"), (COMPILED, "0")], ids=["twins", "compiled"])
def test_kernels(script: str, interpret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: Triton asks once whether it shall interpret."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
