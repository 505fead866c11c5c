"""Gradients of queries, keys and values, rotated back and joined, and cast to fp8 by rows and by columns by a given
multiplier.

Without these a GPU writes the gradient of the projection of attention in 16 bits, and a cast reads it again. What is
cast is rounded to 16 bits all the same: the results are those of two kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.extensions.fp8.cast_transpose import CastOrder, CastPair, cast_transpose_with_amax_twin, note
from megatron.extensions.fusions.kernel_choice import FusedKernel, RunShapes, runs_triton
from megatron.extensions.fusions.kernels.cast_transpose import TOLERANCE, made_casts, order_of, paired, wide

WIDTHS = 64, 128, 256
"""Head sizes that are rotated as a whole by Triton's kernel."""


def casts_heads(grads: Sequence[Tensor], tables: Sequence[Tensor], *_: Any) -> bool:
    """Whether `heads_gradient_cast` takes these gradients of heads and tables of a rotation, by distant channels."""
    if len(grads) != 3 or any(grad.shape[-1] != grads[0].shape[-1] for grad in grads):
        return False
    width = grads[0].shape[-1]
    whole = not tables or 2 * tables[0].shape[-1] == width
    return whole and (not runs_triton(grads[0]) or (width in WIDTHS and grads[0].numel() > 0))


def heads_gradient_cast(grads: Sequence[Tensor], tables: Sequence[Tensor], cast: CastOrder) -> CastPair:
    """Casts the gradient [s * b, groups * (heads of a group + 2) * d] of a projection to groups of queries, a key and a
    value. `grads` are those of queries [s, b, heads, d], keys and values [s, b, groups, d]; with `tables`, cosines and
    sines [s, 1 or b, 1, d / 2], queries and keys were rotated (arXiv:2104.09864), and their gradients are turned
    back."""
    if runs_triton(grads[0]):
        dq, dk, dv = (grad.contiguous() for grad in grads)
        cos, sin = (table.expand(-1, dq.shape[1], -1, -1).contiguous() for table in tables) if tables else (None, None)
        *values, scale = _heads_cast(dq, dk, dv, cos, sin, *cast[:2], *cast.wanted, cast.dtype)
        return paired(values, [scale], cast.wanted)
    return _in_torch(grads, tables, cast)


def _in_torch(grads: Sequence[Tensor], tables: Sequence[Tensor], cast: CastOrder) -> CastPair:
    twin = region(heads_gradient_cast_twin, True, static=True)
    pair, amax = twin(tuple(grads), tuple(tables), cast.multiplier, cast.wanted, cast.dtype)
    note(cast.noted, amax)
    return pair


def heads_gradient_cast_twin(
    grads: Sequence[Tensor],
    tables: Sequence[Tensor],
    multiplier: Tensor,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
) -> tuple[CastPair, Tensor]:
    """`heads_gradient_cast` in torch, but for the note: also returns the amax."""
    dq, dk, dv = grads
    if tables:
        dq, dk = _turned_back(dq, *tables), _turned_back(dk, *tables)
    groups = dv.shape[2]
    joined = torch.cat([part.unflatten(2, (groups, -1)) for part in (dq, dk, dv)], dim=3)
    return cast_transpose_with_amax_twin(joined.flatten(0, 1).flatten(1), multiplier, wanted, dtype)


def _turned_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = wide(x).chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(x.dtype)


@torch.library.custom_op("megatron::heads_gradient_cast", mutates_args=("noted",), device_types="cuda")
def _heads_cast(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    multiplier: Tensor,
    noted: Tensor | None,
    rows: bool,
    columns: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    from megatron.extensions.fusions.kernels import heads_cast_triton

    return heads_cast_triton.heads_gradient_cast((dq, dk, dv), cos, sin, multiplier, noted, (rows, columns), dtype)


@_heads_cast.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, *tables_and_cast: Any) -> list[Tensor]:
    width = sum(grad.shape[2] for grad in (dq, dk, dv)) * dq.shape[3]
    return made_casts(dq, (dq.shape[0] * dq.shape[1], width), *tables_and_cast[-3:])


def _samples(shapes: RunShapes) -> Iterator[tuple[Any, ...]]:
    if shapes.fp8 == "delayed":
        samples, angles = shapes.tokens // shapes.length, shapes.random(shapes.length, 1, 1, shapes.head_dim // 2)
        heads = (shapes.heads, shapes.groups, shapes.groups)
        grads = tuple(shapes.random(shapes.length, samples, count, shapes.head_dim) for count in heads)
        yield grads, (angles.cos(), angles.sin()), order_of(grads[0], torch.float8_e5m2)


HEADS_CAST = FusedKernel(heads_gradient_cast, _in_torch, casts_heads, _samples, TOLERANCE)
