"""Planned expert products: one kernel for all experts of a rank, where torch would compute one product per expert.

The planner assumes that the tokens of a grouped product are distributed evenly over the experts. If each expert has a
separate product, every product is launched separately, and the last wave of tiles of every product may fill the GPU
only in part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.kernels import LEFT_OUT
from megatron.core.moe import grouped_gemms
from megatron.core.moe.grouped_gemms import Segments
from megatron.extensions.speed.fp8 import grouped
from megatron.extensions.speed.fp8.casts import Scaled
from megatron.extensions.speed.fp8.grouped import ExpertTiles


class Products(Protocol):
    """Interface for recording matrix products: the part of `Launches` that this module needs."""

    def product(self, name: str, a: Tensor, b: Tensor, out: Tensor, options: dict[str, object]) -> None: ...


def _add_products(launches: Products, out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> None:
    """Record the product that adds dy_e^T x_e to out[e] for each expert e.

    dy_e has the shape [n_e, o], x_e has the shape [n_e, i], and `out` has the shape [experts, o, i].
    """
    if x.shape[0]:
        launches.product("grouped_", dy.t(), x, out, {})


def _add_fp8_products(launches: Products, out: Tensor, dy: ExpertTiles, x: ExpertTiles, tile_ends: Tensor) -> None:
    """Record the same products as `_add_products`, but with fp8 operands. Padding is not counted."""
    launches.product("fp8_grouped_", dy.values[:, : dy.rows], x.values.t()[: x.rows], out, {})


def _multiply_rows(
    launches: Products, a: Scaled, b: Scaled, segments: Segments, out_dtype: torch.dtype, in_one_kernel: bool
) -> Tensor:
    """Plan the product of each row of `a` with the transposed matrix of the row's expert.

    The shapes of `a` and `b` are [n, k] and [experts, m, k]. Returns a tensor [n, m].
    """
    out = torch.empty(a.values.shape[0], b.values.shape[1], dtype=out_dtype)
    if out.shape[0]:
        launches.product("fp8_grouped", a.values, b.values.transpose(1, 2), out, {})
    return segments.clear_spare_(out)


PLANNED: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "add_products_grouped_": (grouped_gemms.add_products_grouped_, _add_products),
    "add_fp8_products_grouped_": (grouped.add_fp8_products_grouped_, _add_fp8_products),
    "grouped_scaled_mm": (grouped.grouped_scaled_mm, _multiply_rows),
}
"""Pairs (operation, planned replacement), keyed by kernel name."""


TORCH: dict[str, Callable[..., object]] = {
    "add_fp8_products_grouped_": partial(grouped.add_products_of_tiles_, dtype=torch.bfloat16)
}
"""Plain-torch replacements for operations that run without their fused kernel. Only operations whose CPU implementation
differs from the GPU implementation are listed."""


def planned_expert_products(
    launches: Products, fused: bool = True
) -> dict[Callable[..., object], Callable[..., object]]:
    """Map torch functions to the functions that replace them in a plan.

    If `fused` is True, the plan uses every kernel that is not disabled in this process. Otherwise, the plan contains
    one torch product per expert. If the fp8 kernel for the weight gradients of experts is disabled, GPUs compute these
    products in 16 bits.
    """
    found: dict[Callable[..., object], Callable[..., object]] = {}
    for name, (plain, planned) in PLANNED.items():
        own = unwrap(plain)
        found[own] = partial(planned, launches) if fused and name not in LEFT_OUT else TORCH.get(name, own)
    return found
