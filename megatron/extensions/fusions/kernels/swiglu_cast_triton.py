"""Triton kernel of `swiglu_cast.py`: a program computes a tile, casts it, and stores it as it is and transposed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.fusions.kernels.cast_transpose_triton import (
    FORMATS,
    WARPS,
    _bits_of_size,
    cast_and_store,
    casts_of,
    note_amax,
    outputs_of,
    state_of,
)

TILE_N, TILE_F = 128, 64
"""Tokens and features of a tile: a backward holds three operands and two results of one in registers."""


@triton.jit
def swiglu_tiles(  # type: ignore[no-untyped-def]
    x,
    grad,
    multiplier,
    rows,
    columns,
    scale,
    state,
    noted,
    n,
    f,
    NOTES: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_F: tl.constexpr,
):
    """x [n, 2f] -> SiLU(gate) * up [n, f], or with BACKWARD the gradient of x from that of it, cast to `rows` and
    `columns`. The amax is noted."""
    across = tl.cdiv(f, TILE_F)
    i = ((tl.program_id(0) // across) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    j = ((tl.program_id(0) % across) * TILE_F + tl.arange(0, TILE_F)).to(tl.int64)
    inside = (i < n)[:, None] & (j < f)[None, :]
    at = x + i[:, None] * (2 * f) + j[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + f, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(multiplier)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dtype = x.dtype.element_ty
    if BACKWARD:
        dy = tl.load(grad + i[:, None] * f + j[None, :], mask=inside, other=0.0).to(tl.float32)
        of_gate = (dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dtype).to(tl.float32)
        of_up = (dy * (gate * sigmoid)).to(dtype).to(tl.float32)
        cast_and_store(of_gate, by, by, rows, columns, i, j, i < n, j < f, n, 2 * f, ROWS, COLUMNS, FORMAT, LARGEST)
        cast_and_store(of_up, by, by, rows, columns, i, j + f, i < n, j < f, n, 2 * f, ROWS, COLUMNS, FORMAT, LARGEST)
        bits = tl.maximum(_bits_of_size(of_gate), _bits_of_size(of_up))
    else:
        y = (gate * sigmoid * up).to(dtype).to(tl.float32)
        cast_and_store(y, by, by, rows, columns, i, j, i < n, j < f, n, f, ROWS, COLUMNS, FORMAT, LARGEST)
        bits = _bits_of_size(y)
    note_amax(tl.max(tl.where(inside, bits, 0)), state, multiplier, scale, noted, NOTES)


def swiglu_cast(
    x: Tensor,
    grad: Tensor | None,
    multiplier: Tensor,
    noted: Tensor | None,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Returns the values by rows and by columns, as wanted, of SwiGLU or, given a `grad`, of the gradient of x, and
    the scale; updates `noted`."""
    assert x.is_contiguous() and (grad is None or grad.is_contiguous())
    n, f = x.shape[0], x.shape[1] // 2
    rows, columns = outputs_of(n, f if grad is None else 2 * f, wanted, dtype, x.device)
    tiles = triton.cdiv(n, TILE_N) * triton.cdiv(f, TILE_F)
    if not tiles:
        return casts_of((rows, columns), wanted, multiplier.reciprocal())
    scale = torch.empty((), device=x.device)
    swiglu_tiles[(tiles,)](
        x,
        x if grad is None else grad,
        multiplier,
        rows,
        columns,
        scale,
        state_of(x.device),
        scale if noted is None else noted,
        n,
        f,
        noted is not None,
        grad is not None,
        *wanted,
        FORMATS[dtype],
        torch.finfo(dtype).max,
        TILE_N,
        TILE_F,
        num_warps=WARPS,
    )
    return casts_of((rows, columns), wanted, scale)
