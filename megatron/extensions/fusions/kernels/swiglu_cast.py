"""SwiGLU and its gradient cast to fp8 by rows and by columns, by a given multiplier, from one read of the operands.

Without these a GPU writes the activation, or the gradient of its input, in 16 bits, and a cast reads it again. What is
cast is rounded to 16 bits all the same: the results are those of two kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.parts import operation
from megatron.extensions.fp8.cast_transpose import CastPair, cast_transpose_with_amax_twin, note
from megatron.extensions.fusions.kernel_choice import FusedKernel, RunShapes
from megatron.extensions.fusions.kernels.cast_transpose import TOLERANCE, made_casts, on_triton, order_of, paired, wide


@operation
def swiglu_cast(
    x: Tensor, multiplier: Tensor, noted: Tensor | None, wanted: tuple[bool, bool], dtype: torch.dtype, compiled: bool
) -> CastPair:
    """Casts SiLU(gate) * up [n, f] of x [n, 2f], gate before up (arXiv:2002.05202), as `cast_transpose_noting_amax`
    casts a matrix."""
    pair, amax = region(swiglu_cast_twin, compiled, static=True)(x, multiplier, wanted, dtype)
    note(noted, amax)
    return pair


@operation
def swiglu_gradient_cast(
    x: Tensor,
    grad: Tensor,
    multiplier: Tensor,
    noted: Tensor | None,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
    compiled: bool,
) -> CastPair:
    """Casts the gradient [n, 2f] of x, from the `grad` [n, f] of SwiGLU's output, in the same way."""
    pair, amax = region(swiglu_gradient_cast_twin, compiled, static=True)(x, grad, multiplier, wanted, dtype)
    note(noted, amax)
    return pair


def _cast(x: Tensor, multiplier: Tensor, noted: Tensor | None, wanted: tuple[bool, bool], *rest: Any) -> CastPair:
    *values, scale = _forward(x, multiplier, noted, *wanted, rest[0])
    return paired(values, [scale], wanted)


def _gradient_cast(
    x: Tensor, grad: Tensor, multiplier: Tensor, noted: Tensor | None, wanted: tuple[bool, bool], *rest: Any
) -> CastPair:
    *values, scale = _backward(x, grad, multiplier, noted, *wanted, rest[0])
    return paired(values, [scale], wanted)


def swiglu_cast_twin(
    x: Tensor, multiplier: Tensor, wanted: tuple[bool, bool], dtype: torch.dtype
) -> tuple[CastPair, Tensor]:
    """`swiglu_cast` in torch, but for the note: also returns the amax."""
    gate, up = wide(x).chunk(2, dim=-1)
    return cast_transpose_with_amax_twin((F.silu(gate) * up).to(x.dtype), multiplier, wanted, dtype)


def swiglu_gradient_cast_twin(
    x: Tensor, grad: Tensor, multiplier: Tensor, wanted: tuple[bool, bool], dtype: torch.dtype
) -> tuple[CastPair, Tensor]:
    """`swiglu_gradient_cast` in torch, but for the note: also returns the amax."""
    gate, up = wide(x).chunk(2, dim=-1)
    dy = wide(grad)
    dx = torch.cat((torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)), dim=-1)
    return cast_transpose_with_amax_twin(dx.to(x.dtype), multiplier, wanted, dtype)


@torch.library.custom_op("megatron::swiglu_cast", mutates_args=("noted",), device_types="cuda")
def _forward(
    x: Tensor, multiplier: Tensor, noted: Tensor | None, rows: bool, columns: bool, dtype: torch.dtype
) -> list[Tensor]:
    from megatron.extensions.fusions.kernels import swiglu_cast_triton

    return swiglu_cast_triton.swiglu_cast(x, None, multiplier, noted, (rows, columns), dtype)


@_forward.register_fake
def _(x: Tensor, multiplier: Tensor, noted: Tensor | None, *cast: Any) -> list[Tensor]:
    return made_casts(x, (x.shape[0], x.shape[1] // 2), *cast)


@torch.library.custom_op("megatron::swiglu_gradient_cast", mutates_args=("noted",), device_types="cuda")
def _backward(
    x: Tensor, grad: Tensor, multiplier: Tensor, noted: Tensor | None, rows: bool, columns: bool, dtype: torch.dtype
) -> list[Tensor]:
    from megatron.extensions.fusions.kernels import swiglu_cast_triton

    return swiglu_cast_triton.swiglu_cast(x, grad, multiplier, noted, (rows, columns), dtype)


@_backward.register_fake
def _(x: Tensor, grad: Tensor, multiplier: Tensor, noted: Tensor | None, *cast: Any) -> list[Tensor]:
    return made_casts(x, (x.shape[0], x.shape[1]), *cast)


def _inputs(shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor]]:
    if shapes.fp8 == "delayed":
        yield shapes.random(shapes.tokens, 2 * shapes.ffn), shapes.random(shapes.tokens, shapes.ffn)


SWIGLU_CAST = FusedKernel(
    _cast, swiglu_cast, on_triton, lambda shapes: ((x, *order_of(x), True) for x, _ in _inputs(shapes)), TOLERANCE
)
SWIGLU_GRADIENT_CAST = FusedKernel(
    _gradient_cast,
    swiglu_gradient_cast,
    on_triton,
    lambda shapes: ((x, grad, *order_of(x, torch.float8_e5m2), True) for x, grad in _inputs(shapes)),
    TOLERANCE,
)
