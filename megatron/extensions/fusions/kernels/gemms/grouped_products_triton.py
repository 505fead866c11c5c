"""Kernels of `grouped_products`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = {"BLOCK_O": 128, "BLOCK_I": 128, "BLOCK_N": 64}
"""Rows and columns of a weight gradient that one program computes, and rows of tokens that it takes at a time."""

CLEARED = 1024
"""Columns that a program clears."""


@triton.jit
def add_products_kernel(  # type: ignore[no-untyped-def]
    out, dy, x, ends, outputs, inputs, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr
):
    tiles = tl.cdiv(inputs, BLOCK_I)
    tile, expert = tl.program_id(0), tl.program_id(1)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    if start >= stop:
        return
    o = (tile // tiles) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (tile % tiles) * BLOCK_I + tl.arange(0, BLOCK_I)
    total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for first in range(start, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        row, used = n[:, None].to(tl.int64), n[:, None] < stop
        of_dy = tl.load(dy + row * outputs + o[None, :], mask=used & (o[None, :] < outputs), other=0.0)
        of_x = tl.load(x + row * inputs + i[None, :], mask=used & (i[None, :] < inputs), other=0.0)
        total = tl.dot(tl.trans(of_dy), of_x, total, input_precision="ieee")
    place = (expert.to(tl.int64) * outputs + o[:, None]) * inputs + i[None, :]
    inside = (o[:, None] < outputs) & (i[None, :] < inputs)
    total += tl.load(out + place, mask=inside, other=0.0)
    tl.store(out + place, total, mask=inside)


@triton.jit
def clear_rows_kernel(x, ends, experts, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    if row < tl.load(ends + experts - 1):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + row.to(tl.int64) * width + column, 0.0, mask=column < width)


def add_grouped_products_(out: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """See `grouped_products`."""
    experts, outputs, inputs = out.shape
    assert out.is_contiguous() and dy.is_contiguous() and x.is_contiguous() and ends.dtype == torch.int32
    assert dy.shape == (x.shape[0], outputs) and x.shape[1] == inputs and ends.shape == (experts,)
    tiles = triton.cdiv(outputs, TILE["BLOCK_O"]) * triton.cdiv(inputs, TILE["BLOCK_I"])
    add_products_kernel[(tiles, experts)](out, dy, x, ends, outputs, inputs, **TILE, num_warps=8)


def clear_rows_behind_(x: Tensor, ends: Tensor) -> None:
    """See `grouped_products`."""
    rows, width = x.shape
    assert x.is_contiguous() and ends.dtype == torch.int32
    if rows:
        clear_rows_kernel[(rows, triton.cdiv(width, CLEARED))](x, ends, ends.shape[0], width, BLOCK=CLEARED)
