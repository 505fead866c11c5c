"""Choose the fastest kernels for GEMMs that add their product to an existing tensor. The kernels are timed for the
model's tensor shapes. torch needs more than one pass over memory for the addition.

For fp8 weight gradients, the cuBLASLt and Triton kernels read and write the gradient once. torch's kernel writes a
product in fp32, and then a separate addition reads the product and the gradient, and writes the gradient.

The GEMM of a row-parallel layer can compute the residual addition: y = addend + x Wᵀ + bias, where the addend is the
residual stream. The next norm then need not read the product and write the sum. The sum is rounded once, whereas a
separate addition rounds twice. torch's `addmm` would first copy the addend into the output; cuBLASLt reads the addend
as its matrix C and writes the result to D.

The fastest kernel depends on the GPU, the shape and the library versions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import ParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.linear_gemms import matrix_of, residual_gemm
from megatron.extensions.speed.fp8 import casts
from megatron.extensions.speed.fp8.casts import E4M3, TILE, Scaled, scaled_mm
from megatron.extensions.speed.fp8.recipes import Fp8Gemms
from megatron.extensions.speed.fusions.kernel_choice import (
    SLOWER,
    Choice,
    Clock,
    FusedKernel,
    RunShapes,
    compare,
    device_clock,
    gpu_operator,
    no_result,
    runs_triton,
)
from megatron.extensions.speed.fusions.kernels import cublaslt

TORCH = "torch"
"""Name of torch's implementation, which first writes a product and then adds it in a separate kernel."""

GEMM, NORM = "GEMM", "norm"
"""Names of the operations that can compute the residual addition."""

SIZES = 16
"""Required divisor of the numbers of input and output features in `residual_gemm` and in fp8 GEMMs. With this divisor,
the rows of matrices are also aligned."""

CHECKED = 64
"""Number of rows and number of columns that are compared at each corner of a result."""

TOLERANCES = {torch.float32: 2.0**-7, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""Allowed error for each result dtype: the norm of the error, divided by the norm of the correct result. For 16-bit
results, the tolerance is twice the rounding error of one element. For fp32 weight gradients, the tolerance is the same
as for bf16."""

Run = Callable[[], object]


_SUM = "(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, bool overwrite) -> ()"
KERNELS = {
    "triton": gpu_operator("kernels.products_triton:add_product_triton_", _SUM, no_result),
    "cublaslt": gpu_operator("kernels.cublaslt:add_product_cublaslt_", _SUM, no_result),
}
"""Kernels by name. Each kernel computes out [o, i] += (a * a_scale) (b * b_scale)ᵀ with sums in fp32. If `overwrite` is
True, the product replaces `out`. out is fp32; a [o, n] and b [i, n] are fp8. Scales are fp32 scalars. "triton" also
supports row scales ([o, 1] and [i, 1]) and scales of 128-element tiles ([o, n / 128] and [i, n / 128]). All tensors are
contiguous. All kernels raise RuntimeError for unsupported operands."""


@dataclass(frozen=True, order=True)
class ProductShape:
    """Shape of the matrix product that computes a weight gradient dW [outputs, inputs] as a sum over tokens."""

    outputs: int
    inputs: int
    tokens: int


@dataclass
class WeightGradKernel:
    """Weight gradient operation that runs, for each shape, the kernel that `choose_weight_grads` selected. For other
    shapes, it runs the Triton kernel."""

    chosen: dict[ProductShape, str] = field(default_factory=dict)

    def suits(self, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool) -> bool:
        fits = runs_triton(out) and out.dtype == torch.float32 and out.is_contiguous()
        # timings used aligned gradient sums, but gradient sums in a gradient buffer may be unaligned
        if self._kernel(out, dy) == "cublaslt":
            fits = fits and out.data_ptr() % cublaslt.ALIGNMENT == 0
        return fits and self._kernel(out, dy) != TORCH

    def __call__(self, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool) -> None:
        add_product_(self._kernel(out, dy), out, dy, x, overwrite)

    def samples(self, shapes: RunShapes) -> tuple[()]:
        """Return no operands. `choose_weight_grads` compares this kernel with others after the model is built, once for
        each layer shape."""
        return ()

    def _kernel(self, out: Tensor, dy: Scaled) -> str:
        return self.chosen.get(ProductShape(out.shape[0], out.shape[1], dy.values.shape[1]), "triton")


WEIGHT_GRADS = WeightGradKernel()


def add_product_(kernel: str, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool = False) -> None:
    """Compute out [o, i] += dy xᵀ with the given kernel.

    Args:
        kernel: "torch" or a name in `KERNELS`.
        out: Gradient sum [o, i].
        dy: Output gradient [o, n], cast by columns.
        x: Input [i, n], cast by columns.
        overwrite: If True, replace the contents of `out` with dy xᵀ.
    """
    if kernel == TORCH:
        casts.add_fp8_product_.__wrapped__(out, dy, x, overwrite)  # type: ignore[attr-defined]
    else:
        KERNELS[kernel](out, dy.values, x.values, dy.scale, x.scale, overwrite)


def choose_weight_grads(
    modules: Iterable[nn.Module],
    tokens: int,
    recipe: str,
    stage: Axis,
    device: torch.device,
    clock: Clock = device_clock,
) -> Mapping[ProductShape, Choice]:
    """For each shape of the fp8 linear layers, time the weight gradient kernels and select the fastest.

    Collective over the ranks of a pipeline stage, whose layers have the same shapes on all ranks. All ranks use the
    kernel whose time on the slowest rank is the shortest, so that replicas stay equal.

    Args:
        modules: Modules that contain the fp8 linear layers.
        tokens: Tokens of a micro-batch on each rank.
        recipe: fp8 recipe.
        stage: Axis of the pipeline stage's ranks.
        device: Device of the layers.
        clock: Function that times a run.
    """
    linears = [part for module in modules for part in module.modules() if isinstance(part, ParallelLinear)]
    layers = [(linear.weight, linear.gemms) for linear in linears if isinstance(linear.gemms, Fp8Gemms)]
    formats = {}
    WEIGHT_GRADS.chosen.clear()
    for weight, gemms in layers:
        outputs, inputs = matrix_of(weight).shape
        shape = ProductShape(outputs, inputs, tokens // (gemms.tp.size if gemms.cuts.tokens else 1))
        formats[shape] = gemms.grad_format
    found = {}
    for shape in sorted(formats):
        found[shape] = compare(weight_grad_runs(shape, formats[shape], recipe, device), clock, device, stage)
        WEIGHT_GRADS.chosen[shape] = found[shape].winner or TORCH
    return found


def weight_grad_runs(
    shape: ProductShape, grad_format: torch.dtype, recipe: str, device: torch.device
) -> dict[str, Run]:
    """Return a mapping from kernel names to functions. Each function runs its kernel on random operands.

    Args:
        shape: Shape of the product.
        grad_format: fp8 format of the output gradient.
        recipe: fp8 recipe of the casts.
        device: Device of the operands.
    """
    generator = torch.Generator(device).manual_seed(0)

    def operand(rows: int, dtype: torch.dtype) -> Scaled:
        values = torch.randn(rows, shape.tokens, generator=generator, dtype=torch.bfloat16, device=device).to(dtype)
        size = {"rowwise": (rows, 1), "blockwise": (rows, -(-shape.tokens // TILE))}.get(recipe, ())
        return Scaled(values, torch.full(size, 0.5, device=device))

    dy, x = operand(shape.outputs, grad_format), operand(shape.inputs, E4M3)
    out = torch.zeros(shape.outputs, shape.inputs, device=device)

    def twice(kernel: str) -> Tensor:
        out.zero_()
        for _ in range(2):
            add_product_(kernel, out, dy, x)
        return out

    def expected(part: slice) -> Tensor:
        return 2 * casts.dequantized_mm(_rows(dy, part), _rows(x, part), torch.float32)

    return {
        kernel: _checked(partial(add_product_, kernel, out, dy, x), partial(twice, kernel), expected, kernel)
        for kernel in (*KERNELS, TORCH)
    }


def _checked(run: Run, sums: Callable[[], Tensor], expected: Callable[[slice], Tensor], kernel: str) -> Run:
    """Return a function that calls `run`. The first call of this function raises RuntimeError if the first or last rows
    and columns of `sums()` differ from `expected`."""
    known = False

    def checked() -> None:
        nonlocal known
        if not known:
            found = sums()
            for part in (slice(CHECKED), slice(-CHECKED, None)):
                right = expected(part).float()
                error = ((found[part, part] - right).norm() / right.norm()).item()
                if not error < TOLERANCES[found.dtype]:
                    raise RuntimeError(f"{kernel} adds wrong sums, with a relative error of {error:.1e}")
            known = True
        run()

    return checked


def _rows(x: Scaled, part: slice) -> Scaled:
    return Scaled(x.values[part], x.scale[part] if x.scale.ndim else x.scale)


def adds_residual(x: Tensor | None, weight: Tensor, *_: object) -> bool:
    """Return True if `residual_gemm` supports the weight [m, k]: it is on a GPU, has 16-bit or fp8 elements, and m and
    k are multiples of `SIZES`."""
    return weight.is_cuda and weight.itemsize <= 2 and weight.shape[0] % SIZES == 0 and weight.shape[-1] % SIZES == 0


def _computed(
    x: Tensor,
    weight: Tensor,
    addend: Tensor,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    return _residual_product(x.contiguous(), weight, addend.contiguous(), bias, *(scales or (None, None)))


def residual_sum(
    x: Tensor, weight: Tensor, addend: Tensor, bias: Tensor | None, scales: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Compute addend + x Wᵀ + bias with torch, as a rounded product and a separate addition.

    Args:
        x: Input [n, k].
        weight: Weight [m, k].
        addend: Addend [n, m].
        bias: Bias [m].
        scales: Scales of x and of the weight in fp8; None in 16 bits.
    """
    return _product(x, weight, addend.dtype, bias, scales).add_(addend)


def _product(
    x: Tensor, weight: Tensor, dtype: torch.dtype, bias: Tensor | None, scales: tuple[Tensor, Tensor] | None
) -> Tensor:
    if scales is None:
        return F.linear(x, weight, bias)
    return scaled_mm(Scaled(x, scales[0]), Scaled(weight, scales[1]), dtype, bias, fast_accumulation=True)


def residual_product(
    x: Tensor, weight: Tensor, addend: Tensor, bias: Tensor | None, x_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    """Compute addend + x Wᵀ + bias with cuBLASLt. If cuBLASLt does not support the operands, the function falls back to
    `residual_sum`.

    Args:
        x: Input [n, k].
        weight: Weight [m, k].
        addend: Addend [n, m].
        bias: Bias [m].
        x_scale: Scale of x in fp8.
        weight_scale: Scale of the weight in fp8.
    """
    scales = None if x_scale is None or weight_scale is None else (x_scale, weight_scale)
    try:
        return cublaslt.residual_product(x, weight, addend, bias, scales)
    except RuntimeError:
        return residual_sum(x, weight, addend, bias, scales)


def _fake_sum(
    x: Tensor, weight: Tensor, addend: Tensor, bias: Tensor | None, x_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    return torch.empty_like(addend)


_residual_product = gpu_operator(
    "gemm_choice:residual_product",
    "(Tensor x, Tensor weight, Tensor addend, Tensor? bias, Tensor? x_scale, Tensor? weight_scale) -> Tensor",
    _fake_sum,
)


RESIDUAL_GEMM = FusedKernel(_computed, residual_gemm, adds_residual, lambda shapes: (), 2.0**-7)
"""Residual GEMM. `choose_additions` compares this kernel with torch for each layer."""


@dataclass(frozen=True, order=True)
class ResidualShape:
    """Shape of the matrix product in a row-parallel layer."""

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
    """For each layer shape, time the residual addition in the layer's GEMM and in the next norm. Set `adds_residual` of
    each layer according to the faster variant.

    Collective over the ranks of a pipeline stage. Variants are compared by the times of the slowest rank.

    Args:
        modules: Modules that contain the linear layers. Only layers that support an addend are timed.
        tokens: Tokens of a micro-batch on each rank.
        stage: Axis of the pipeline stage's ranks.
        device: Device of the layers.
        clock: Function that times a run.
    """
    linears: dict[ResidualShape, list[RowParallelLinear]] = {}
    for linear in _row_parallel(modules):
        if linear.takes_addend():
            outputs, inputs = matrix_of(linear.weight).shape
            bias, fp8 = linear.bias is not None, isinstance(linear.gemms, Fp8Gemms)
            linears.setdefault(ResidualShape(tokens, outputs, inputs, bias, fp8), []).append(linear)
    found = {}
    for shape in sorted(linears):
        dtype = linears[shape][0].weight.dtype
        found[shape] = compare(residual_runs(shape, dtype, device), clock, device, stage)
        for linear in linears[shape]:
            linear.adds_residual = place_of(found[shape]) == GEMM
    return found


def place_of(choice: Choice) -> str:
    """Return `GEMM` or `NORM`: the operation in which the residual addition is faster."""
    within, after = (choice.seconds[name] for name in (GEMM, NORM))
    return GEMM if math.isfinite(within) and within <= SLOWER * after else NORM


def keep_additions_in_norms(modules: Iterable[nn.Module]) -> None:
    """Turn off residual additions within GEMMs in all layers."""
    for linear in _row_parallel(modules):
        linear.adds_residual = False


def _row_parallel(modules: Iterable[nn.Module]) -> list[RowParallelLinear]:
    return [part for module in modules for part in module.modules() if isinstance(part, RowParallelLinear)]


def residual_runs(shape: ResidualShape, dtype: torch.dtype, device: torch.device) -> dict[str, Run]:
    """Return two functions to time. Both functions compute a GEMM and a residual addition on random operands. The first
    function runs a GEMM with an addend. The second function runs a GEMM without an addend, and then a pass over memory
    for the addition in the norm."""
    generator = torch.Generator(device).manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype, device=device)

    x, weight = made(shape.tokens, shape.inputs), made(shape.outputs, shape.inputs)
    addend, bias = made(shape.tokens, shape.outputs), made(shape.outputs) if shape.bias else None
    scales = None
    if shape.fp8:
        x, weight = x.to(E4M3), weight.to(E4M3)
        scales = torch.full((), 0.5, device=device), torch.full((), 0.25, device=device)

    def within() -> Tensor:
        return cublaslt.residual_product(x, weight, addend, bias, scales)

    def expected(part: slice) -> Tensor:
        of_bias = None if bias is None else bias[part]
        of_part = x[part], weight[part], addend[part, part], of_bias, scales
        return residual_gemm.__wrapped__(*of_part)  # type: ignore[attr-defined]

    def after() -> None:
        torch.empty_like(addend).copy_(_product(x, weight, dtype, bias, scales))

    return {GEMM: _checked(within, within, expected, "cuBLASLt"), NORM: after}
