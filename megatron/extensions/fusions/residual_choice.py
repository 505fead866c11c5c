"""Chooses by timing what adds to the residual stream: the GEMM of a row-parallel layer, or the next norm.

The GEMM, y = addend + x Wᵀ + bias, reads the stream as its addend, and saves the norm a pass that reads the product and
writes the sum. What of that remains depends on the GPU, the shape and cuBLASLt's version. The sum is rounded once, and
twice where a product is added later. torch's `addmm` would copy the addend into the output before it adds to that;
cuBLASLt reads it as the product's matrix C and writes another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.linear_gemms import matrix_of, residual_gemm
from megatron.extensions.fp8.casts import E4M3, Scaled, scaled_mm
from megatron.extensions.fp8.recipes import Fp8Gemms
from megatron.extensions.fusions.kernel_choice import Choice, Clock, FusedKernel, compare, device_clock
from megatron.extensions.fusions.kernels.gemms import cublaslt

SIZES = 16
"""Features of both sides are multiples of this, as fp8 products and aligned rows need it."""


def adds_residual(x: Tensor | None, weight: Tensor, *_: Any) -> bool:
    """Whether products with a `weight` [m, k] in 16 bits may be `residual_gemm`, for their operands' device and
    sizes."""
    return weight.is_cuda and weight.itemsize == 2 and weight.shape[0] % SIZES == 0 and weight.shape[-1] % SIZES == 0


def _computed(
    x: Tensor,
    weight: Tensor,
    addend: Tensor,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """What cuBLASLt does not support is a product of torch's and an addition."""
    return _residual_gemm(x.contiguous(), weight, addend.contiguous(), bias, *(scales or (None, None)))


def residual_sum(
    x: Tensor, weight: Tensor, addend: Tensor, bias: Tensor | None, scales: tuple[Tensor, Tensor] | None
) -> Tensor:
    """A product of torch's, rounded, and then the sum."""
    if scales is None:
        return F.linear(x, weight, bias).add_(addend)
    product = torch._scaled_mm(x, weight.t(), *scales, bias=bias, out_dtype=addend.dtype, use_fast_accum=True)
    return product.add_(addend)


@torch.library.custom_op("megatron::residual_gemm", mutates_args=())
def _residual_gemm(
    x: Tensor, weight: Tensor, addend: Tensor, bias: Tensor | None, x_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    scales = None if x_scale is None or weight_scale is None else (x_scale, weight_scale)
    if not x.is_cuda:
        return residual_gemm.__wrapped__(x, weight, addend, bias, scales)  # type: ignore[attr-defined]
    try:
        return cublaslt.residual_product(x, weight, addend, bias, scales)
    except RuntimeError:
        return residual_sum(x, weight, addend, bias, scales)


@_residual_gemm.register_fake
def _(x: Tensor, weight: Tensor, addend: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(addend)


RESIDUAL_GEMM = FusedKernel(_computed, residual_gemm, adds_residual, lambda shapes: (), 2.0**-7)
"""Compared by layer, in `choose_additions`."""


GEMM, NORM = "GEMM", "norm"

SLOWER = 1.1
"""How much longer the GEMM may take. It is expected to take a few percent less: runs are not to differ in their last
bits because of noise in the times."""

CHECKED = 64
"""Rows and columns whose sums are compared."""

TOLERANCES = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""How far sums may be off, relative to their norm: twice the rounding of one."""

Run = Callable[[], object]


@dataclass(frozen=True, order=True)
class ResidualShape:
    """The product of a row-parallel layer."""

    tokens: int
    outputs: int
    inputs: int
    bias: bool
    fp8: bool

    def __str__(self) -> str:
        return f"{'fp8 ' * self.fp8}{self.tokens} x {self.outputs} x {self.inputs}{' with bias' * self.bias}"


def choose_additions(
    modules: Iterable[nn.Module], tokens: int, stage: Axis, device: torch.device, clock: Clock = device_clock
) -> Mapping[ResidualShape, Choice]:
    """Times both ways at each shape of the layers in `modules` that take an addend, for micro-batches of `tokens` on a
    rank, and sets the layers' `adds_residual`. Collective over the ranks of a pipeline stage, whose slowest rank
    counts."""
    linears: dict[ResidualShape, list[RowParallelLinear]] = {}
    for linear in (part for module in modules for part in module.modules()):
        if isinstance(linear, RowParallelLinear) and linear.takes_addend():
            outputs, inputs = matrix_of(linear.weight).shape
            bias, fp8 = linear.bias is not None, isinstance(linear.gemms, Fp8Gemms)
            linears.setdefault(ResidualShape(tokens, outputs, inputs, bias, fp8), []).append(linear)
    found = {}
    for shape in sorted(linears):
        dtype = linears[shape][0].weight.dtype
        found[shape] = compare(runs_of(shape, dtype, device), clock, device, stage)
        for linear in linears[shape]:
            linear.adds_residual = place_of(found[shape]) == GEMM
    return found


def place_of(choice: Choice) -> str:
    """Where additions are made, by what was timed."""
    within, after = (choice.seconds[name] for name in (GEMM, NORM))
    return GEMM if math.isfinite(within) and within <= SLOWER * after else NORM


def keep_additions_in_norms(modules: Iterable[nn.Module]) -> None:
    """Lets no layer add to the residual stream within its GEMM."""
    for linear in (part for module in modules for part in module.modules()):
        if isinstance(linear, RowParallelLinear):
            linear.adds_residual = False


def runs_of(shape: ResidualShape, dtype: torch.dtype, device: torch.device) -> dict[str, Run]:
    """A run of each way on random operands: the GEMM with its addend, and one without, with the pass that this adds to
    the norm. The first raises RuntimeError if its sums in the first or last rows and columns are wrong."""
    generator = torch.Generator(device).manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype, device=device)

    x, weight = made(shape.tokens, shape.inputs), made(shape.outputs, shape.inputs)
    addend, bias = made(shape.tokens, shape.outputs), made(shape.outputs) if shape.bias else None
    scales = None
    if shape.fp8:
        x, weight = x.to(E4M3), weight.to(E4M3)
        scales = torch.full((), 0.5, device=device), torch.full((), 0.25, device=device)
    known = False

    def within() -> None:
        nonlocal known
        out = cublaslt.residual_product(x, weight, addend, bias, scales)
        for part in () if known else (slice(CHECKED), slice(-CHECKED, None)):
            of_bias = None if bias is None else bias[part]
            of_part = x[part], weight[part], addend[part, part], of_bias, scales
            expected = residual_gemm.__wrapped__(*of_part).float()  # type: ignore[attr-defined]
            error = ((out[part, part] - expected).norm() / expected.norm()).item()
            if not error < TOLERANCES[dtype]:
                raise RuntimeError(f"cuBLASLt adds wrong sums, with a relative error of {error:.1e}")
        known = True

    def after() -> None:
        if scales is None:
            product = torch.nn.functional.linear(x, weight, bias)
        else:
            product = scaled_mm(Scaled(x, scales[0]), Scaled(weight, scales[1]), dtype, bias, fast_accumulation=True)
        torch.empty_like(addend).copy_(product)

    return {GEMM: within, NORM: after}
