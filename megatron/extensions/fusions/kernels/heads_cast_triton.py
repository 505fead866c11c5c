"""Triton kernel of `heads_cast.py`: a program turns one head of a tile of tokens, casts it, and stores it as it is and
transposed."""

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

TILE_N = 128
"""Tokens of a tile."""


@triton.jit
def head_tiles(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    cos,
    sin,
    multiplier,
    rows,
    columns,
    scale,
    state,
    noted,
    n,
    groups,
    q_per_group,
    NOTES: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    HALF: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """dq [n, groups * q_per_group, 2 * HALF], dk and dv [n, groups, 2 * HALF] -> casts of them joined by groups.
    The amax is noted."""
    slots = groups * (q_per_group + 2)
    slot, tile = tl.program_id(0) % slots, tl.program_id(0) // slots
    group, place = slot // (q_per_group + 2), slot % (q_per_group + 2)
    i = (tile * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    j = tl.arange(0, HALF)
    in_i, in_j = i < n, j < HALF
    source, heads, head = dv, groups, group
    if place < q_per_group:
        source, heads, head = dq, groups * q_per_group, group * q_per_group + place
    elif place == q_per_group:
        source = dk
    at = source + (i[:, None] * heads + head) * (2 * HALF) + j[None, :]
    first = tl.load(at, mask=in_i[:, None], other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=in_i[:, None], other=0.0).to(tl.float32)
    dtype = dq.dtype.element_ty
    if TURNS:
        turns = place <= q_per_group
        angle = i[:, None] * HALF + j[None, :]
        c = tl.load(cos + angle, mask=in_i[:, None] & turns, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=in_i[:, None] & turns, other=0.0).to(tl.float32)
        turned = tl.where(turns, first * c + second * s, first)
        second = tl.where(turns, second * c - first * s, second)
        first = turned
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    by, width, k = tl.load(multiplier), slots * (2 * HALF), slot * (2 * HALF) + j
    cast_and_store(first, by, by, rows, columns, i, k, in_i, in_j, n, width, ROWS, COLUMNS, FORMAT, LARGEST)
    cast_and_store(second, by, by, rows, columns, i, k + HALF, in_i, in_j, n, width, ROWS, COLUMNS, FORMAT, LARGEST)
    bits = tl.max(tl.maximum(_bits_of_size(first), _bits_of_size(second)))
    note_amax(bits, state, multiplier, scale, noted, NOTES)


def heads_gradient_cast(
    grads: tuple[Tensor, Tensor, Tensor],
    cos: Tensor | None,
    sin: Tensor | None,
    multiplier: Tensor,
    noted: Tensor | None,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    """See `heads_cast`."""
    assert all(x.is_contiguous() for x in (*grads, cos, sin) if x is not None)
    s, b, groups, width = grads[2].shape
    n, slots = s * b, sum(grad.shape[2] for grad in grads)
    rows, columns = outputs_of(n, slots * width, wanted, dtype, grads[0].device)
    programs = triton.cdiv(n, TILE_N) * slots
    scale = torch.empty((), device=grads[0].device)
    head_tiles[(programs,)](
        *grads,
        grads[0] if cos is None else cos,
        grads[0] if sin is None else sin,
        multiplier,
        rows,
        columns,
        scale,
        state_of(scale.device),
        scale if noted is None else noted,
        n,
        groups,
        slots // groups - 2,
        noted is not None,
        cos is not None,
        *wanted,
        FORMATS[dtype],
        torch.finfo(dtype).max,
        width // 2,
        TILE_N,
        num_warps=WARPS,
    )
    return casts_of((rows, columns), wanted, scale)
