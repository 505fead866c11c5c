"""Chooses the kernels of fp8 weight gradients by timing them at the model's own shapes.

cuBLASLt's product that adds to its output, Triton's, or torch's, which writes a product that is then added: which one
is fastest depends on the GPU, the shape and the versions of libraries. torch's product is written in fp32, and an
addition reads it and both reads and writes the gradient. The other two read and write the gradient once. Neither has
run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import ParallelLinear
from megatron.core.tensor_parallel.linear_gemms import matrix_of
from megatron.extensions.fp8.casts import E4M3, TILE, Scaled, dequantized_mm
from megatron.extensions.fp8.casts import add_fp8_product_ as in_torch
from megatron.extensions.fp8.recipes import Fp8Gemms
from megatron.extensions.fusions.kernel_choice import Choice, Clock, RunShapes, compare, device_clock, runs_triton
from megatron.extensions.fusions.kernels.gemms import cublaslt

KERNELS = ("triton", "cublaslt")


@torch.library.custom_op("megatron::add_fp8_product_", mutates_args=("out",), device_types="cuda")
def add_fp8_product_(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, kernel: str, overwrite: bool = False
) -> None:
    """out [o, i] += (a * a_scale) (b * b_scale)ᵀ, summed in fp32, by one of `KERNELS`; with `overwrite` = it.

    out is fp32; a [o, n] and b [i, n] are fp8. Scales are fp32: [], or for "triton" also [o, 1] and [i, 1], or of tiles
    of 128, [o, n / 128] and [i, n / 128]. All are contiguous. Raises RuntimeError where a kernel does not support the
    operands.
    """
    if kernel == "triton":
        from megatron.extensions.fusions.kernels.gemms import fp8_weight_grad_triton

        fp8_weight_grad_triton.add_product_(out, a, b, a_scale, b_scale, overwrite)
    else:
        cublaslt.add_product_(out, a, b, a_scale, b_scale, overwrite)


add_fp8_product_.register_fake(lambda *operands, **options: None)


TORCH = "torch"
"""The kernel that writes a product, which is then added."""

CHECKED, TOLERANCE = 64, 2.0**-7
"""Rows and columns whose sums are compared, and how far they may be off: as much as rounding to bf16."""

Run = Callable[[], object]


@dataclass(frozen=True, order=True)
class ProductShape:
    """dW [outputs, inputs] summed over tokens."""

    outputs: int
    inputs: int
    tokens: int


@dataclass
class WeightGradKernel:
    """The kernels of weight gradients by shape, as `choose_weight_grads` found them; Triton's where it has not."""

    chosen: dict[ProductShape, str] = field(default_factory=dict)

    def suits(self, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool) -> bool:
        fits = runs_triton(out) and out.dtype == torch.float32 and out.is_contiguous()
        if self._kernel(out, dy) == "cublaslt":  # was timed on aligned sums; a buffer may hold others
            fits = fits and out.data_ptr() % cublaslt.ALIGNMENT == 0
        return fits and self._kernel(out, dy) != TORCH

    def __call__(self, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool) -> None:
        add_product_(self._kernel(out, dy), out, dy, x, overwrite)

    def samples(self, shapes: RunShapes) -> tuple[()]:
        """None: they are compared by layer, once the model is built."""
        return ()

    def _kernel(self, out: Tensor, dy: Scaled) -> str:
        return self.chosen.get(ProductShape(out.shape[0], out.shape[1], dy.values.shape[1]), KERNELS[0])


WEIGHT_GRADS = WeightGradKernel()


def add_product_(kernel: str, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool = False) -> None:
    """out [o, i] += dy x^T by a kernel: "torch" or one of `KERNELS`."""
    if kernel == TORCH:
        in_torch.__wrapped__(out, dy, x, overwrite)  # type: ignore[attr-defined]
    else:
        add_fp8_product_(out, dy.values, x.values, dy.scale, x.scale, kernel, overwrite)


def choose_weight_grads(
    modules: Iterable[nn.Module],
    tokens: int,
    recipe: str,
    stage: Axis,
    device: torch.device,
    clock: Clock = device_clock,
) -> Mapping[ProductShape, Choice]:
    """Times the kernels at each shape of the fp8 linear layers in `modules`, whose micro-batches have `tokens` on a
    rank, and lets the layers use the fastest ones. Collective over the ranks of a pipeline stage, which have the same
    shapes: the slowest rank counts, and all use the same kernels, so that replicas stay equal."""
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
        found[shape] = compare(runs_of(shape, formats[shape], recipe, device), clock, device, stage)
        WEIGHT_GRADS.chosen[shape] = found[shape].winner or TORCH
    return found


def runs_of(shape: ProductShape, grad_format: torch.dtype, recipe: str, device: torch.device) -> dict[str, Run]:
    """A run of each kernel, on random operands as a recipe casts them."""
    generator = torch.Generator(device).manual_seed(0)

    def operand(rows: int, dtype: torch.dtype) -> Scaled:
        values = torch.randn(rows, shape.tokens, generator=generator, dtype=torch.bfloat16, device=device).to(dtype)
        size = {"rowwise": (rows, 1), "blockwise": (rows, -(-shape.tokens // TILE))}.get(recipe, ())
        return Scaled(values, torch.full(size, 0.5, device=device))

    dy, x = operand(shape.outputs, grad_format), operand(shape.inputs, E4M3)
    out = torch.zeros(shape.outputs, shape.inputs, device=device)
    return {kernel: checked(kernel, out, dy, x) for kernel in (*KERNELS, TORCH)}


def checked(kernel: str, out: Tensor, dy: Scaled, x: Scaled) -> Run:
    """A run of a kernel. The first raises RuntimeError if sums in the first or last rows and columns are wrong."""
    known = False

    def run() -> None:
        nonlocal known
        if not known:
            out.zero_()
            for _ in range(2):
                add_product_(kernel, out, dy, x)
            for part in (slice(CHECKED), slice(-CHECKED, None)):
                expected = 2 * dequantized_mm(_rows(dy, part), _rows(x, part), torch.float32)
                error = ((out[part, part] - expected).norm() / expected.norm()).item()
                if not error < TOLERANCE:
                    raise RuntimeError(f"{kernel} adds wrong sums, with a relative error of {error:.1e}")
            known = True
        add_product_(kernel, out, dy, x)

    return run


def _rows(x: Scaled, part: slice) -> Scaled:
    return Scaled(x.values[part], x.scale[part] if x.scale.ndim else x.scale)
