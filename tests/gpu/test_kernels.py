"""Tests that compare GPU kernels with their definitions in torch. The tests cover residual additions within GEMMs,
losses with their gradients, and all kernels that other tests run in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.apart import assert_agrees, multiplies_in_fp8

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")

RESIDUALS = """
from itertools import product
import torch
from megatron.extensions.speed.fusions.kernels import cublaslt
from megatron.core.tensor_parallel.linear_gemms import residual_gemm
from megatron.extensions.speed.fusions.gemm_choice import ResidualShape, residual_runs, residual_sum

device, hopper = torch.device("cuda"), torch.cuda.get_device_capability() >= (8, 9)
for bias, fp8, dtype in product((False, True), (False, True), (torch.bfloat16, torch.float16)):
    if fp8 and (dtype == torch.float16 or not hopper):
        continue
    for run in residual_runs(ResidualShape(512, 384, 256, bias, fp8), dtype, device).values():
        run()  # compares its sums
x, weight, addend = (torch.randn(size, device=device).bfloat16() for size in ((384, 512), (256, 512), (384, 256)))
expected = residual_gemm.__wrapped__(x, weight, addend, None, None)
for found in (residual_gemm(x, weight, addend), residual_sum(x, weight, addend, None, None)):
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-5)
print("agree")
"""

LOSSES = """
import torch
from megatron.extensions.speed.fusions.kernels import cross_entropy as twins

for n, width, vocab_size, z_loss in ((300, 50304, 50257, 0.0), (77, 128256, 128256, 1e-4), (5, 1000, 999, 0.0)):
    torch.manual_seed(n)
    logits, labels = (4 * torch.randn(n, width)).bfloat16(), torch.randint(0, vocab_size, (n,))
    expected, found = logits.clone(), logits.cuda()
    losses = twins.loss_and_gradient_twin_(expected, labels, vocab_size, z_loss)
    on_device = twins.LOSS(found, labels.cuda(), vocab_size, z_loss)
    torch.testing.assert_close(on_device.cpu(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.cpu(), expected, rtol=2.0**-7, atol=1e-9)
    factors = torch.randint(0, 3, (n,)).float() / 2
    twins.SCALE(found, factors.cuda())
    twins.SCALE.plain(expected, factors)
    torch.testing.assert_close(found.cpu(), expected, rtol=2.0**-7, atol=1e-9)
print("agree")
"""


GROUPED = """
from megatron.extensions.speed.fusions.kernels import grouped_triton
from megatron.extensions.speed.fusions.kernels import grouped_fp8_triton
from tests.extensions.fusions import test_kernels_grouped_fp8 as in_fp8
from tests.extensions.fusions.test_kernels_grouped import check_grouped, check_list
check_grouped("cuda")
for tiling in ("wide", "tall", "small"):
    check_list(grouped_triton, "cuda", tiling)
in_fp8.check_casts(grouped_fp8_triton, "cuda")
for tiling in ("square", "shallow", "small"):
    in_fp8.check_sums(grouped_fp8_triton, "cuda", tiling)
for tiling in ("square", "shallow", "flat"):
    in_fp8.check_rows(grouped_fp8_triton, "cuda", tiling)
print("agree")
"""

CASTS = """
from tests.extensions.fusions.test_kernels_norms import check_heads, check_norms
from tests.extensions.fusions.test_kernels_cast import check_swiglu
check_norms("cuda")
check_heads("cuda")
check_swiglu("cuda")
print("agree")
"""


@pytest.mark.parametrize("program", [RESIDUALS, LOSSES, GROUPED], ids=["residual additions", "losses", "experts"])
def test_kernels_match_their_twins(program: str) -> None:
    assert_agrees(program)


@pytest.mark.skipif(not multiplies_in_fp8(), reason="needs a GPU of compute capability 8.9 or above")
def test_norms_and_activations_with_casts_match_their_twins() -> None:
    assert_agrees(CASTS)
