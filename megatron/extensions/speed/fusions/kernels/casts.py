"""Cast matrices to fp8 by rows and by columns, in a single pass over each matrix. The kernels that compute SwiGLU, its
gradient and the gradients of attention heads also cast their results.

Without these fused kernels, a kernel would write the result in 16 bits, and a separate cast kernel would read it again.
Fused kernels still round values to 16 bits before the cast, so the results equal those of a separate cast kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.kernels import operation
from megatron.core.transformer.activations import FUNCTIONS
from megatron.extensions.speed.fp8.casts import (
    CastOrder,
    CastPair,
    CastParts,
    amax_of,
    amax_of_rows_and_columns,
    cast_transpose,
    cast_transpose_noting_amax,
    cast_transpose_with_amax_twin,
    noting,
    transpose,
)
from megatron.extensions.speed.fusions.kernel_choice import FusedKernel, RunShapes, gpu_operator, runs_triton
from megatron.extensions.speed.fusions.split_heads import joined_heads

TOLERANCE = 2.0**-7
"""Allowed error of a cast: the norm of the difference from torch's cast, divided by the norm of torch's cast. Values
halfway between two fp8 numbers may be rounded in either direction."""

MODULE = "kernels.casts_triton"

CAST = "Tensor multiplier, Tensor(a!)? noted, bool[] wanted, ScalarType dtype"
"""Schema of the last arguments of all operators that compute casts. The arguments are the fields of a `CastOrder`. The
operators return the cast by rows (if requested), the cast by columns (if requested), and the scale. An operator never
returns the same tensor twice, because torch does not allow this."""


def casts_of_operator(made: list[Tensor], cast: CastOrder) -> CastPair:
    """Build a `CastPair` from `made`, the results of an operator that casts a matrix."""
    *values, scale = made
    return paired(values, [scale], cast.wanted)


def paired(values: list[Tensor], scales: list[Tensor], wanted: tuple[bool, bool]) -> CastPair:
    """Build a `CastPair` from the values and scales of the casts that `wanted` selects. In both lists, the cast by rows
    comes first. Both casts may share a single scale."""
    rows, columns = wanted
    by_rows = (values[0], scales[0]) if rows else (None, None)
    return CastPair(*by_rows, *((values[-1], scales[-1]) if columns else (None, None)))


def made_casts(x: Tensor, size: tuple[int, int], *cast: *CastParts) -> list[Tensor]:
    """Fake implementation of an operator that computes a matrix [n, k] from x and casts it. Returns uninitialized
    tensors for the requested casts by rows [n, k] and by columns [k, n], and for the scale."""
    _, _, wanted, dtype = cast
    sizes = [shape for shape, wants in zip((size, size[::-1]), wanted, strict=True) if wants]
    return [*(x.new_empty(shape, dtype=dtype) for shape in sizes), x.new_empty((), dtype=torch.float32)]


def wide(x: Tensor) -> Tensor:
    """Convert x to fp32 if it has 16 bits."""
    return x.float() if x.itemsize == 2 else x


def _fake_cast(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    wanted = [(amax, shape) for amax, shape in ((row_amax, x.shape), (column_amax, x.shape[::-1])) if amax is not None]
    vector = wanted[0][0].ndim > 0
    sizes = [(shape[0], 1) for _, shape in wanted] if vector else [()]
    values = [x.new_empty(shape, dtype=dtype) for _, shape in wanted]
    return values + [x.new_empty(size, dtype=torch.float32) for size in sizes]


def _fake_noting(x: Tensor, *cast: *CastParts) -> list[Tensor]:
    return made_casts(x, (x.shape[0], x.shape[1]), *cast)


def _fake_transposed(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])


def _fake_amax(x: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    shapes = [shape for shape, wants in zip(((x.shape[0], 1), (1, x.shape[1])), wanted, strict=True) if wants]
    return [x.new_empty(shape, dtype=torch.float32) for shape in shapes]


_by_amax = gpu_operator(
    f"{MODULE}:cast_transpose",
    "(Tensor x, Tensor? row_amax, Tensor? column_amax, ScalarType dtype) -> Tensor[]",
    _fake_cast,
)
_noting_amax = gpu_operator(f"{MODULE}:cast_transpose_noting_amax", f"(Tensor x, {CAST}) -> Tensor[]", _fake_noting)
_amax = gpu_operator(f"{MODULE}:amax_of_rows_and_columns", "(Tensor x, bool[] wanted) -> Tensor[]", _fake_amax)
_transposed = gpu_operator(f"{MODULE}:transposed_bytes", "(Tensor x) -> Tensor", _fake_transposed)


def _cast(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype, _: bool) -> CastPair:
    wanted = row_amax is not None, column_amax is not None
    made = _by_amax(x, row_amax, column_amax, dtype)
    return paired(made[: sum(wanted)], made[sum(wanted) :], wanted)


def _amax_of_rows_and_columns(x: Tensor, wanted: tuple[bool, bool], _: bool) -> tuple[Tensor | None, Tensor | None]:
    found = _amax(x, wanted)
    return found[0] if wanted[0] else None, found[-1] if wanted[1] else None


def on_triton(x: Tensor, *_: object) -> bool:
    """Return True if Triton kernels can cast the matrix. Triton kernels do not support empty matrices."""
    return runs_triton(x) and x.numel() > 0


def casts_of(shapes: RunShapes) -> Iterator[Tensor]:
    """Yield the random matrix [tokens, hidden] on which cast kernels are compared. Yield nothing if the run does not
    use fp8."""
    if shapes.fp8 is not None:
        yield shapes.random(shapes.tokens, shapes.hidden)


def order_of(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> CastOrder:
    """Return a request to cast x by rows and by columns, and to record its amax. The multiplier is computed from the
    amax of x."""
    return CastOrder(torch.finfo(dtype).max / amax_of(x), torch.zeros((), device=x.device), (True, True), dtype)


E4M3 = torch.float8_e4m3fn
CAST_BY_AMAX = FusedKernel(
    _cast,
    cast_transpose,
    on_triton,
    lambda shapes: ((x, amax_of(x), amax_of(x), E4M3, True) for x in casts_of(shapes)),
    TOLERANCE,
)
CAST_NOTING = FusedKernel(
    lambda x, cast, compiled: casts_of_operator(_noting_amax(x, *cast), cast),
    cast_transpose_noting_amax,
    on_triton,
    lambda shapes: ((x, order_of(x), True) for x in casts_of(shapes)),
    TOLERANCE,
)
AMAX = FusedKernel(
    _amax_of_rows_and_columns,
    amax_of_rows_and_columns,
    on_triton,
    lambda shapes: ((x, (True, True), True) for x in casts_of(shapes)),
    0.0,
)
TRANSPOSE = FusedKernel(
    lambda values, compiled: _transposed(values.view(torch.uint8)).view(values.dtype),
    transpose,
    on_triton,
    lambda shapes: ((x.to(E4M3), True) for x in casts_of(shapes)),
    0.0,
)


SWIGLU = FUNCTIONS["swiglu"]

WIDTHS = 64, 128, 256
"""Head sizes whose rotation the Triton kernel supports."""


@operation
def swiglu_cast(x: Tensor, cast: CastOrder, compiled: bool) -> CastPair:
    """Compute SiLU(gate) * up [n, f] (arXiv:2002.05202), where x [n, 2f] is the concatenation of gate and up. Cast the
    result in the same way as `cast_transpose_noting_amax`."""
    return noting(swiglu_cast_twin, compiled, cast, x)


@operation
def swiglu_gradient_cast(x: Tensor, grad: Tensor, cast: CastOrder, compiled: bool) -> CastPair:
    """Compute the gradient [n, 2f] of the SwiGLU input, and cast it in the same way as `cast_transpose_noting_amax`.

    Args:
        x: Input [n, 2f].
        grad: Gradient [n, f] of the output.
        cast: Requested casts.
        compiled: Whether to use a compiled region.
    """
    return noting(swiglu_gradient_cast_twin, compiled, cast, x, grad)


def swiglu_cast_twin(x: Tensor, cast: CastOrder) -> tuple[CastPair, Tensor]:
    """Plain-torch version of `swiglu_cast` that returns the amax instead of recording it."""
    return cast_transpose_with_amax_twin(SWIGLU[0](wide(x)).to(x.dtype), cast)


def swiglu_gradient_cast_twin(x: Tensor, grad: Tensor, cast: CastOrder) -> tuple[CastPair, Tensor]:
    """Plain-torch version of `swiglu_gradient_cast` that returns the amax instead of recording it."""
    return cast_transpose_with_amax_twin(SWIGLU[1](wide(x), wide(grad)).to(x.dtype), cast)


def casts_heads(grads: Sequence[Tensor], tables: Sequence[Tensor], *_: object) -> bool:
    """Return True if `heads_gradient_cast` supports the head gradients `grads` and the rotation `tables`. The rotation
    must not be interleaved. On GPUs, gradients must have 16 bits, because casts by columns from fp32 to e5m2 are wrong
    in Triton 3.6."""
    if len(grads) != 3 or any(grad.shape[-1] != grads[0].shape[-1] for grad in grads):
        return False
    width = grads[0].shape[-1]
    whole = not tables or 2 * tables[0].shape[-1] == width
    fits = width in WIDTHS and grads[0].numel() > 0 and grads[0].itemsize == 2
    return whole and (fits or not runs_triton(grads[0]))


def heads_gradient_cast(grads: Sequence[Tensor], tables: Sequence[Tensor], cast: CastOrder) -> CastPair:
    """Join the gradients of the heads into the gradient of the qkv projection [s * b, groups * (heads per group + 2) *
    d], and cast it. Each group has several query heads, one key head and one value head. `grads` are the gradients of
    queries [s, b, heads, d], keys and values [s, b, groups, d]. `tables` holds the cosines and sines [s, 1 or b, 1, d /
    2] of the rotation of queries and keys (arXiv:2104.09864). This function rotates the gradients of queries and keys
    back before it casts them."""
    if not runs_triton(grads[0]):
        return _heads_in_torch(grads, tables, cast)
    dq, dk, dv = (grad.contiguous() for grad in grads)
    angles = [table.expand(-1, grads[0].shape[1], -1, -1).contiguous() for table in tables]
    cos, sin = angles or (None, None)
    return casts_of_operator(_heads(dq, dk, dv, cos, sin, *cast), cast)


def _heads_in_torch(grads: Sequence[Tensor], tables: Sequence[Tensor], cast: CastOrder) -> CastPair:
    return noting(heads_gradient_cast_twin, True, cast, tuple(grads), tuple(tables))


def heads_gradient_cast_twin(
    grads: Sequence[Tensor], tables: Sequence[Tensor], cast: CastOrder
) -> tuple[CastPair, Tensor]:
    """Compute `heads_gradient_cast` in plain torch, and return the amax instead of recording it."""
    joined = joined_heads([wide(grad) for grad in grads], tables, grads[-1].shape[2], False).to(grads[0].dtype)
    return cast_transpose_with_amax_twin(joined.flatten(0, 1).flatten(1), cast)


def _fake_swiglu(x: Tensor, grad: Tensor | None, *cast: *CastParts) -> list[Tensor]:
    return made_casts(x, (x.shape[0], x.shape[1] // 2 if grad is None else x.shape[1]), *cast)


def _fake_heads(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, *cast: *CastParts
) -> list[Tensor]:
    width = sum(grad.shape[2] for grad in (dq, dk, dv)) * dq.shape[3]
    return made_casts(dq, (dq.shape[0] * dq.shape[1], width), *cast)


_swiglu = gpu_operator(f"{MODULE}:swiglu_cast", f"(Tensor x, Tensor? grad, {CAST}) -> Tensor[]", _fake_swiglu)
_heads = gpu_operator(
    f"{MODULE}:heads_gradient_cast",
    f"(Tensor dq, Tensor dk, Tensor dv, Tensor? cos, Tensor? sin, {CAST}) -> Tensor[]",
    _fake_heads,
)


def _activations(shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor]]:
    if shapes.fp8 == "delayed":
        yield shapes.random(shapes.tokens, 2 * shapes.ffn), shapes.random(shapes.tokens, shapes.ffn)


def _gradients_of_heads(shapes: RunShapes) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor], CastOrder]]:
    if shapes.fp8 == "delayed":
        samples, angles = shapes.tokens // shapes.length, shapes.random(shapes.length, 1, 1, shapes.head_dim // 2)
        heads = (shapes.heads, shapes.groups, shapes.groups)
        grads = tuple(shapes.random(shapes.length, samples, count, shapes.head_dim) for count in heads)
        yield grads, (angles.cos(), angles.sin()), order_of(grads[0], torch.float8_e5m2)


SWIGLU_CAST = FusedKernel(
    lambda x, cast, compiled: casts_of_operator(_swiglu(x, None, *cast), cast),
    swiglu_cast,
    on_triton,
    lambda shapes: ((x, order_of(x), True) for x, _ in _activations(shapes)),
    TOLERANCE,
)
SWIGLU_GRADIENT_CAST = FusedKernel(
    lambda x, grad, cast, compiled: casts_of_operator(_swiglu(x, grad, *cast), cast),
    swiglu_gradient_cast,
    on_triton,
    lambda shapes: ((x, grad, order_of(x, torch.float8_e5m2), True) for x, grad in _activations(shapes)),
    TOLERANCE,
)
HEADS_CAST = FusedKernel(heads_gradient_cast, _heads_in_torch, casts_heads, _gradients_of_heads, TOLERANCE)
