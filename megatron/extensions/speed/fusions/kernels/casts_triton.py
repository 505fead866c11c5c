"""Triton kernels of `casts.py`. Each kernel reads its operands once.

A program casts one tile, and stores both the cast and its transpose. Magnitudes are compared by their bit patterns,
read as integers. The integers are ordered like the magnitudes, with NaN above infinity. A maximum therefore propagates
NaN and does not depend on the order of operands.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.speed.fp8.casts import SMALLEST_AMAX, CastParts

TILE = 128
WARPS = 8

SWIGLU_TILE = 128, 64
"""Number of tokens and number of features in a tile of the SwiGLU kernels. The backward kernel holds five tiles in
registers: three operands and two results."""


class Casts(NamedTuple):
    """Output tensors of a kernel that casts a matrix [n, k] with a multiplier: the casts, the scale and the amax."""

    rows: Tensor | None
    """Cast by rows [n, k]; None if it is not requested."""
    columns: Tensor | None
    """Cast by columns [k, n]; None if it is not requested."""
    multiplier: Tensor
    scale: Tensor
    state: Tensor
    """Tensor of two integers: the bit pattern of the largest magnitude so far, and the number of finished programs.
    The kernel expects that both integers are zero, and sets them to zero again."""
    noted: Tensor | None
    """Largest amax recorded so far (`CastOrder.noted`). If the amax of the cast matrix is larger, the kernel writes
    that amax to this tensor."""

    @classmethod
    def of(cls, n: int, k: int, *cast: *CastParts) -> Casts:
        """Allocate memory for the casts of a matrix [n, k]. The other arguments are the fields of a `CastOrder`."""
        multiplier, noted, wanted, dtype = cast
        device = multiplier.device
        outputs = outputs_of(n, k, wanted, dtype, device)
        return cls(*outputs, multiplier, torch.empty((), device=device), state_of(device), noted)

    def made(self) -> list[Tensor]:
        """Return the requested casts and their common scale."""
        return [*(values for values in self[:2] if values is not None), self.scale]


def outputs_of(
    n: int, k: int, wanted: Sequence[bool], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate memory for the requested casts of a matrix [n, k], by rows [n, k] and by columns [k, n]."""
    rows, columns = (
        torch.empty(size, dtype=dtype, device=device) if wants else None
        for size, wants in zip(((n, k), (k, n)), wanted, strict=True)
    )
    return rows, columns


_states: dict[tuple[torch.device, int], Tensor] = {}


def state_of(device: torch.device) -> Tensor:
    """Return the tensor for the field `state` of `Casts`. All kernels on a stream share one tensor, because they run
    one after another."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in _states:
        _states[device, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return _states[device, stream]


@triton.jit
def bits_of_size(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def multiplier_for(amax, into, SMALLEST: tl.constexpr):
    largest: tl.constexpr = 448.0 if into.dtype.element_ty == tl.float8e4nv else 57344.0
    bounded = tl.maximum(amax, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    # torch computes `number / tensor` as number * reciprocal(tensor); do the same for bit-equal results
    return tl.where(amax == 0, 1.0, reciprocal(bounded) * largest)


@triton.jit
def rounded(x, multiplier, into):
    largest: tl.constexpr = 448.0 if into.dtype.element_ty == tl.float8e4nv else 57344.0
    scaled = tl.clamp(x * multiplier, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(into.dtype.element_ty, fp_downcast_rounding="rtne")


@triton.jit
def store_casts(values, by_rows, by_columns, rows, columns, i, j, in_i, in_j, n, k):
    """Cast the `values` at the rows i and columns j of a matrix [n, k]. Values for which the masks `in_i` or `in_j` are
    false are not stored. Store `values * by_rows` in `rows` [n, k] and `values * by_columns` in `columns` [k, n]. An
    output that is None is skipped."""
    if rows is not None:
        cast = rounded(values, by_rows, rows)
        tl.store(rows + i[:, None] * k + j[None, :], cast, mask=in_i[:, None] & in_j[None, :])
    if columns is not None:
        cast = rounded(values, by_columns, columns)
        at = j.to(tl.int64)[:, None] * n + i[None, :]
        tl.store(columns + at, tl.trans(cast), mask=in_j[:, None] & in_i[None, :])


@triton.jit
def cast_and_store(values, casts, i, j, in_i, in_j, n, k):
    """Scale `values` by `casts.multiplier`, cast them, and store the casts by rows and by columns that `casts`
    requests."""
    by = tl.load(casts.multiplier)
    store_casts(values, by, by, casts.rows, casts.columns, i, j, in_i, in_j, n, k)


@triton.jit
def note_amax(bits, casts):
    """Update the amax of a matrix with the largest magnitude in this program's block. `bits` is the bit pattern of this
    magnitude. The last program to finish stores the scale of the tensor and records its amax in `noted`. The scale is
    NaN if the amax is not finite."""
    tl.atomic_max(casts.state, bits)
    if tl.atomic_add(casts.state + 1, 1) == tl.num_programs(0) - 1:
        largest = tl.atomic_xchg(casts.state, 0)
        tl.atomic_xchg(casts.state + 1, 0)
        tl.store(casts.scale, reciprocal(tl.load(casts.multiplier)) + 0.0 * largest.to(tl.float32, bitcast=True))
        if casts.noted is not None:
            before = bits_of_size(tl.load(casts.noted))
            tl.store(casts.noted, tl.maximum(before, largest).to(tl.float32, bitcast=True))


@triton.jit
def tile_places(n, k, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """Return the row and column indices of this program's tile in a matrix [n, k], and masks that are True for indices
    inside the matrix."""
    across = tl.cdiv(k, TILE_K)
    i = ((tl.program_id(0) // across) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    j = ((tl.program_id(0) % across) * TILE_K + tl.arange(0, TILE_K)).to(tl.int64)
    return i, j, i < n, j < k


@triton.jit
def load_tile(x, strides, i, j, in_i, in_j):
    at = x + i[:, None] * strides[0] + j[None, :] * strides[1]
    return tl.load(at, mask=in_i[:, None] & in_j[None, :], other=0)


@triton.jit
def noting_tiles(x, strides, casts, n, k, TILE: tl.constexpr):
    """Cast x [n, k] as `casts` specifies, and record its amax."""
    i, j, in_i, in_j = tile_places(n, k, TILE, TILE)
    values = load_tile(x, strides, i, j, in_i, in_j).to(tl.float32)
    cast_and_store(values, casts, i, j, in_i, in_j, n, k)
    note_amax(tl.max(bits_of_size(values)), casts)


@triton.jit
def cast_tiles(
    x, strides, amax, rows, columns, scales, n, k, BY_VECTOR: tl.constexpr, SMALLEST: tl.constexpr, TILE: tl.constexpr
):
    """Cast x [n, k], and store the casts in `rows` [n, k] and `columns` [k, n]. An output that is None is skipped.
    `amax` holds one value for the whole matrix or, if BY_VECTOR is True, a vector [n] for rows and a vector [k] for
    columns. If BY_VECTOR is True, `scales` receives the scales of both casts. Otherwise, `scales` receives a single
    scale."""
    i, j, in_i, in_j = tile_places(n, k, TILE, TILE)
    values = load_tile(x, strides, i, j, in_i, in_j).to(tl.float32)
    by_row, by_column = 1.0, 1.0
    if not BY_VECTOR:
        by_row = multiplier_for(
            tl.load(amax[1] if rows is None else amax[0]), columns if rows is None else rows, SMALLEST
        )
        if tl.program_id(0) == 0:
            tl.store(scales[0], reciprocal(by_row))
        by_column = by_row
    if BY_VECTOR and rows is not None:
        of_rows = multiplier_for(tl.load(amax[0] + i, mask=in_i, other=0.0), rows, SMALLEST)
        if tl.program_id(0) % tl.cdiv(k, TILE) == 0:
            tl.store(scales[0] + i, reciprocal(of_rows), mask=in_i)
        by_row = of_rows[:, None]
    if BY_VECTOR and columns is not None:
        of_columns = multiplier_for(tl.load(amax[1] + j, mask=in_j, other=0.0), columns, SMALLEST)
        if tl.program_id(0) // tl.cdiv(k, TILE) == 0:
            tl.store(scales[1] + j, reciprocal(of_columns), mask=in_j)
        by_column = of_columns[None, :]
    store_casts(values, by_row, by_column, rows, columns, i, j, in_i, in_j, n, k)


@triton.jit
def amax_tiles(x, strides, row_bits, column_bits, n, k, TILE: tl.constexpr):
    """Store the bit pattern of the largest magnitude in each row and column of x [n, k] in `row_bits` [n] and
    `column_bits` [k]. `row_bits` and `column_bits` must be zero before the launch."""
    i, j, in_i, in_j = tile_places(n, k, TILE, TILE)
    bits = bits_of_size(load_tile(x, strides, i, j, in_i, in_j).to(tl.float32))
    if row_bits is not None:
        tl.atomic_max(row_bits + i, tl.max(bits, axis=1), mask=in_i, sem="relaxed")
    if column_bits is not None:
        tl.atomic_max(column_bits + j, tl.max(bits, axis=0), mask=in_j, sem="relaxed")


@triton.jit
def transpose_tiles(x, strides, out, n, k, TILE: tl.constexpr):
    """Transpose x [n, k] -> out [k, n]."""
    i, j, in_i, in_j = tile_places(n, k, TILE, TILE)
    values = load_tile(x, strides, i, j, in_i, in_j)
    tl.store(out + j[:, None] * n + i[None, :], tl.trans(values), mask=in_j[:, None] & in_i[None, :])


@triton.jit
def swiglu_tiles(x, grad, casts, n, f, TILE_N: tl.constexpr, TILE_F: tl.constexpr):
    """Compute and cast SiLU(gate) * up [n, f] from x [n, 2f]. If `grad` is given, the kernel instead computes and casts
    the gradient of x. In both cases, the kernel records the amax of the result."""
    i, j, in_i, in_j = tile_places(n, f, TILE_N, TILE_F)
    gate = load_tile(x, (2 * f, 1), i, j, in_i, in_j).to(tl.float32)
    up = load_tile(x + f, (2 * f, 1), i, j, in_i, in_j).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dtype = x.dtype.element_ty
    if grad is not None:
        dy = load_tile(grad, (f, 1), i, j, in_i, in_j).to(tl.float32)
        of_gate = (dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dtype).to(tl.float32)
        of_up = (dy * (gate * sigmoid)).to(dtype).to(tl.float32)
        cast_and_store(of_gate, casts, i, j, in_i, in_j, n, 2 * f)
        cast_and_store(of_up, casts, i, j + f, in_i, in_j, n, 2 * f)
        bits = tl.maximum(bits_of_size(of_gate), bits_of_size(of_up))
    else:
        y = (gate * sigmoid * up).to(dtype).to(tl.float32)
        cast_and_store(y, casts, i, j, in_i, in_j, n, f)
        bits = bits_of_size(y)
    note_amax(tl.max(tl.where(in_i[:, None] & in_j[None, :], bits, 0)), casts)


@triton.jit
def head_tiles(dq, dk, dv, cos, sin, casts, n, groups, q_per_group, HALF: tl.constexpr, TILE_N: tl.constexpr):
    """Concatenate dq [n, groups * q_per_group, 2 * HALF], dk and dv [n, groups, 2 * HALF] within each group, and cast
    the result. Each program processes one head for a tile of tokens. If cos and sin are given, queries and keys are
    rotated. The kernel also records the amax of the result."""
    slots = groups * (q_per_group + 2)
    slot, tile = tl.program_id(0) % slots, tl.program_id(0) // slots
    group, place = slot // (q_per_group + 2), slot % (q_per_group + 2)
    i = (tile * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    j = tl.arange(0, HALF)
    in_i, in_j = i < n, j < HALF
    source = dv
    heads = groups
    head = group
    if place < q_per_group:
        source = dq
        heads = groups * q_per_group
        head = group * q_per_group + place
    elif place == q_per_group:
        source = dk
    at = source + (i[:, None] * heads + head) * (2 * HALF) + j[None, :]
    first = tl.load(at, mask=in_i[:, None], other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=in_i[:, None], other=0.0).to(tl.float32)
    dtype = dq.dtype.element_ty
    if cos is not None:
        turns = place <= q_per_group
        angle = i[:, None] * HALF + j[None, :]
        c = tl.load(cos + angle, mask=in_i[:, None] & turns, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=in_i[:, None] & turns, other=0.0).to(tl.float32)
        turned = tl.where(turns, first * c + second * s, first)
        second = tl.where(turns, second * c - first * s, second)
        first = turned
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    width, k = slots * (2 * HALF), slot * (2 * HALF) + j
    cast_and_store(first, casts, i, k, in_i, in_j, n, width)
    cast_and_store(second, casts, i, k + HALF, in_i, in_j, n, width)
    note_amax(tl.max(tl.maximum(bits_of_size(first), bits_of_size(second))), casts)


def _tiles(n: int, k: int, tile: tuple[int, int] = (TILE, TILE)) -> tuple[int]:
    return (triton.cdiv(n, tile[0]) * triton.cdiv(k, tile[1]),)


def cast_transpose(x: Tensor, row_amax: Tensor | None, column_amax: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """Cast x by rows and by columns. Returns the values of both casts, followed by their scales. If the amax has the
    shape [], both casts share a single scale. If the amax for rows or columns is None, the cast by rows or by columns
    is omitted. x must not be empty."""
    (n, k), amax = x.shape, (row_amax, column_amax)
    wanted = [one is not None for one in amax]
    vector = any(one is not None and one.ndim > 0 for one in amax)
    outputs = outputs_of(n, k, wanted, dtype, x.device)
    scales = tuple(torch.empty(size, device=x.device) for size in ([(n, 1), (k, 1)] if vector else [()]))
    operands = x, x.stride(), amax, *outputs, scales, n, k, vector, SMALLEST_AMAX, TILE
    cast_tiles[_tiles(n, k)](*operands, num_warps=WARPS)
    found = [scale for scale, wants in zip(scales, wanted, strict=True) if wants] if vector else [*scales]
    return [values for values in outputs if values is not None] + found


def cast_transpose_noting_amax(x: Tensor, *cast: *CastParts) -> list[Tensor]:
    """Launch the kernel that casts x. `cast` contains the fields of a `CastOrder`. The kernel updates the field
    `noted`. Returns the cast by rows and the cast by columns, if requested, and the scale."""
    n, k = x.shape
    casts = Casts.of(n, k, *cast)
    noting_tiles[_tiles(n, k)](x, x.stride(), casts, n, k, TILE, num_warps=WARPS)
    return casts.made()


def amax_of_rows_and_columns(x: Tensor, wanted: list[bool]) -> list[Tensor]:
    """Launch the kernel that computes the largest magnitudes of rows [n, 1] and of columns [1, k]. Returns only the
    results that `wanted` requests."""
    n, k = x.shape
    bits = [
        torch.zeros(size, dtype=torch.int32, device=x.device) if wants else None
        for size, wants in zip(((n, 1), (1, k)), wanted, strict=True)
    ]
    amax_tiles[_tiles(n, k)](x, x.stride(), *bits, n, k, TILE, num_warps=WARPS)
    return [found.view(torch.float32) for found in bits if found is not None]


def transposed_bytes(x: Tensor) -> Tensor:
    """Transpose a matrix of bytes."""
    n, k = x.shape
    out = torch.empty(k, n, dtype=x.dtype, device=x.device)
    transpose_tiles[_tiles(n, k)](x, x.stride(), out, n, k, TILE, num_warps=WARPS)
    return out


def swiglu_cast(x: Tensor, grad: Tensor | None, *cast: *CastParts) -> list[Tensor]:
    """Return the requested casts of SwiGLU (or of the gradient of x if `grad` is given), and the scale. `cast` contains
    the fields of a `CastOrder`. The kernel updates the field `noted`."""
    assert x.is_contiguous() and (grad is None or grad.is_contiguous())
    n, f = x.shape[0], x.shape[1] // 2
    casts = Casts.of(n, f if grad is None else 2 * f, *cast)
    swiglu_tiles[_tiles(n, f, SWIGLU_TILE)](x, grad, casts, n, f, *SWIGLU_TILE, num_warps=WARPS)
    return casts.made()


def heads_gradient_cast(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, *cast: *CastParts
) -> list[Tensor]:
    """Launch the kernel that joins and casts head gradients. Return the requested casts and their scale. `cast`
    contains the fields of a `CastOrder`. The kernel updates the field `noted`."""
    assert all(x.is_contiguous() for x in (dq, dk, dv, cos, sin) if x is not None)
    s, b, groups, width = dv.shape
    n, slots = s * b, sum(grad.shape[2] for grad in (dq, dk, dv))
    casts = Casts.of(n, slots * width, *cast)
    operands = dq, dk, dv, cos, sin, casts, n, groups, slots // groups - 2, width // 2, TILE
    head_tiles[(triton.cdiv(n, TILE) * slots,)](*operands, num_warps=WARPS)
    return casts.made()
