"""Scaled casts to fp8 and GEMMs of their results (Micikevicius et al., "FP8 Formats", arXiv 2209.05433).

A matrix x is held as x8 = round(x * m). The multiplier m brings its largest value to the largest number of the format.
A GEMM sums in fp32 and multiplies by the scales 1 / m of both operands. Casts saturate, yet NaN and Inf are not lost:
they make the scale NaN or infinite, and with it the result.

The casts themselves are `kernels/cast_transpose.py`. Collectives run between a tensor's amax and its cast.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""Largest finite number of each format."""

ALIGNMENT = 16
"""CUDA kernels take matrix dimensions that are multiples of this."""

FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with fp8 GEMMs (Ada)."""


class Scaled(NamedTuple):
    """An fp8 matrix: fp8 values [n, k] and an fp32 scale, one for all [] or one for each row [n, 1]. It stands for
    values * scale."""

    values: Tensor
    scale: Tensor

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns values * scale, [n, k] in `dtype`."""
        return self.values.to(dtype) * self.scale.to(dtype)


def formats(name: str) -> tuple[torch.dtype, torch.dtype]:
    """Returns the formats (of inputs and weights, of output gradients) of --fp8-format `name`."""
    return E4M3, E5M2 if name == "hybrid" else E4M3


@cache
def has_kernel(device_type: str, by_row: bool) -> bool:
    """Whether torch has an fp8 GEMM for a device type, with one scale for each operand or one for each row."""
    if device_type != "cpu":
        return True
    zeros = torch.zeros(ALIGNMENT, ALIGNMENT, dtype=E4M3)
    scale = torch.ones((ALIGNMENT, 1) if by_row else ())
    try:
        torch._scaled_mm(zeros, zeros.t(), scale, scale.t() if by_row else scale, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def scaled_mm(
    a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None = None, fast_accumulation: bool = False
) -> Tensor:
    """fp8 GEMM: a [n, k], b [m, k], bias [m] -> a bᵀ + bias [n, m], summed in fp32 and rounded to `out_dtype`.

    With a scale for each row, CUDA returns bf16 whatever `out_dtype`: the one dtype that all of torch's kernels return.
    The only place that knows kernels. Both operands are row-major, so that b's transpose is column-major, the only
    arrangement that Hopper takes. CUDA needs multiples of 16 for k and m, and at most one operand in e5m2. CPU kernels
    multiply dequantized operands, as `dequantized_mm` does, which stands in for a missing kernel. With
    `fast_accumulation`, Hopper's tensor cores keep partial sums to fewer bits.
    """
    by_row = a.scale.ndim == 2
    if not has_kernel(a.values.device.type, by_row):
        return dequantized_mm(a, b, out_dtype, bias)
    if by_row and a.values.is_cuda:
        out_dtype = torch.bfloat16
    scale_b = b.scale.t() if by_row else b.scale
    return torch._scaled_mm(
        a.values, b.values.t(), a.scale, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accumulation
    )


def dequantized_mm(a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Computes `scaled_mm` without an fp8 kernel."""
    out = a.dequantized() @ b.dequantized().t()
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)
