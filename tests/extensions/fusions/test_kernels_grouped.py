"""Kernels of grouped products: Triton's interpreter, which multiplies no bf16, against the twins in torch, and compiled
for GPUs."""

from __future__ import annotations

from itertools import product

import torch

from megatron.core.moe.experts import Segments, add_each_product_
from tests.triton_cases import compiled, run_apart


def check_twins(device: str = "cpu") -> None:
    from megatron.extensions.fusions.kernels import products_triton as kernels

    dtypes = [(torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float16, torch.float16)]
    if device != "cpu":  # fp32 is multiplied in TF32 there
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


def check_compiled() -> None:
    from megatron.extensions.fusions.kernels import products_triton as kernels

    types = {"dy": "*bf16", "x": "*bf16", "ends": "*i32", **dict.fromkeys(("outputs", "inputs", "experts"), "i32")}
    types |= {"width": "i32"}
    for capability, main in product((80, 90), ("fp32", "bf16")):
        for constants in (kernels.GROUPED_TILE, kernels.GROUPED_TILE | {"inputs": 1}):
            built = compiled(
                kernels.add_products_kernel, types | {"out": f"*{main}"}, constants, capability, num_warps=8
            )
            assert built.metadata.shared <= 160 * 1024, built.metadata.shared
            assert "inputs" in constants or "mma" in built.asm["ptx"]
        assert compiled(kernels.clear_rows_kernel, types, {"BLOCK": kernels.CLEARED}, capability).asm["cubin"]


def test_interpreted_kernels_are_the_twins() -> None:
    run_apart(check_twins, interpret=True)


def test_kernels_compile() -> None:
    run_apart(check_compiled, interpret=False)
