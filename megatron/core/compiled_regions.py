"""torch.compile for element-wise code between GEMMs: each region becomes one kernel.

A region is a pure function of tensors. GEMMs, attention and collectives stay outside: a compiler would call the same
kernels, and outside of it hooks, weight-gradient queues and the order of collectives stay as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from megatron.core.torch_private import raise_recompile_limit

RECOMPILE_LIMIT = 64
"""Variants (shape, stride, dtype, needs a gradient) of one region. Beyond its limit torch runs a region uncompiled."""

Region = TypeVar("Region", bound=Callable[..., Any])


def region(function: Region, compiled: bool, static: bool = False) -> Region:
    """Returns `function`, or its compiled twin, which is compiled when it first runs.

    Shapes that change make a twin dynamic. A `static` one is compiled for each shape instead: its kernels use wide
    loads, but it suits only tensors with the same few shapes in every step. Its sums have an order that no timing
    decides: ranks that reduce the same values, as norms do in tensor parallelism, get the same bits.
    """
    return _compiled(function, static) if compiled else function


@cache
def _compiled(function: Region, static: bool) -> Region:
    raise_recompile_limit(RECOMPILE_LIMIT)
    if static:
        return torch.compile(function, dynamic=False, options={"deterministic": True})  # type: ignore[return-value]
    return torch.compile(function)  # type: ignore[return-value]
