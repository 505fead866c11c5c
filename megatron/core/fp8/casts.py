"""Eight-bit floating point: casts that scale, and products of what they leave (arXiv 2209.05433).

A matrix x is held as x8 = round(x * m), with a multiplier m that brings its largest value to the largest number of the
format; a product is summed in fp32 and multiplied by the scales 1 / m of both operands. Casts saturate. What is not
finite stays so, whatever a cast makes of it: it makes the scale NaN or infinite, and so the product.

The casts are pure functions of tensors, so that they can be compiled as regions; collectives lie between them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""Largest finite number of each format."""

SMALLEST_AMAX = 2.0**-100
"""What is smaller is scaled as this is, so that multipliers remain finite."""

ALIGNMENT = 16
"""Matrix dimensions that CUDA's kernels take are multiples of this."""

FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply in fp8."""


class Scaled(NamedTuple):
    """values * scale: fp8 numbers [n, k], and one scale for all [] or for each row [n, 1], fp32."""

    values: Tensor
    scale: Tensor

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[n, k] in `dtype`."""
        return self.values.to(dtype) * self.scale.to(dtype)


def formats(name: str) -> tuple[torch.dtype, torch.dtype]:
    """(of inputs and weights, of gradients of outputs) under --fp8-format `name`."""
    return E4M3, E5M2 if name == "hybrid" else E4M3


def transposed_bytes(x: Tensor) -> Tensor:
    """x [n, k] of bytes -> [k, n], row-major."""
    return x.t().contiguous()


def amax_of(x: Tensor) -> Tensor:
    """The largest absolute value, a scalar in fp32; NaN if there is one."""
    return x.abs().amax().to(torch.float32)


def amax_of_rows(x: Tensor) -> Tensor:
    """[n, k] -> [n, 1], that of each row."""
    return x.abs().amax(dim=1, keepdim=True).to(torch.float32)


def multiplier_of(amax: Tensor, largest: float | Tensor, margin: int = 0) -> Tensor:
    """largest / amax / 2^margin; 1 where amax is 0, 0 or NaN where it is not finite."""
    return torch.where(amax == 0, 1.0, largest / 2.0**margin / amax.clamp(min=SMALLEST_AMAX))


def _rounded(x: Tensor, multiplier: Tensor, dtype: torch.dtype) -> Tensor:
    """x * multiplier to the nearest number of the format, to its largest where it is beyond: overflow saturates by the
    clamp, as what conversions do with it differs from device to device."""
    largest = LARGEST[dtype]
    return (x.to(torch.float32) * multiplier).clamp(-largest, largest).to(dtype).contiguous()


def cast_by_amax(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Scaled:
    """x [n, k] scaled by `amax`, [] or [n, 1], which is that of x or of a larger tensor that x is a part of."""
    multiplier = multiplier_of(amax, LARGEST[dtype])
    return Scaled(_rounded(x, multiplier, dtype), multiplier.reciprocal())


def cast_by_multiplier(x: Tensor, multiplier: Tensor, dtype: torch.dtype) -> tuple[Scaled, Tensor]:
    """x [n, k] with a multiplier that does not depend on it, and the largest absolute value of x."""
    amax = amax_of(x)
    scale = multiplier.reciprocal() + 0.0 * amax  # NaN if amax is not finite: the cast may have hidden that
    return Scaled(_rounded(x, multiplier, dtype), scale), amax


@cache
def has_kernel(device_type: str, by_row: bool) -> bool:
    """Whether torch multiplies fp8 matrices on such devices, with one scale each or with one for each row."""
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
    """a bᵀ + bias [n, m] of a [n, k] and b [m, k], summed in fp32 and rounded to `out_dtype`; with a scale for each row
    on CUDA to bf16, the one dtype in which every kernel of torch returns that.

    The one place that knows kernels. Both operands are given row-major, so that b's transpose is column-major: the only
    arrangement that Hopper multiplies. CUDA wants k and m to be multiples of 16, and not both operands in e5m2. The
    kernel of CPUs multiplies what it has dequantised, as `dequantized_mm` does, which takes its place where
    there is none. `fast_accumulation` is for Hopper, whose tensor cores then keep partial sums to fewer bits.
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
    """What `product` computes, without a kernel for fp8."""
    out = a.dequantized() @ b.dequantized().t()
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)
