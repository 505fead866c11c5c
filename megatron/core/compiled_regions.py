"""torch.compile for element-wise code between GEMMs: each region becomes one kernel.

A region is a pure function of tensors. GEMMs, attention and collectives stay outside: a compiler would call the same
kernels, and outside of it hooks, weight-gradient queues and the order of collectives stay as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, wraps
from typing import Generic, ParamSpec, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

from megatron.core.torch_private import raise_recompile_limit

RECOMPILE_LIMIT = 64
"""Variants (shape, stride, dtype, needs a gradient) of one region. Beyond its limit torch runs a region uncompiled."""

K = ParamSpec("K")
R = TypeVar("R")


class CompiledRegion(Generic[K, R]):
    """A region whose compiled twin runs. A `TorchFunctionMode` sees the call as that of one function, as it sees those
    of torch."""

    def __init__(self, function: Callable[K, R], static: bool) -> None:
        self.function, self.static = function, static

    @cached_property
    def twin(self) -> Callable[K, R]:
        """Made by the first call, as to load the compiler takes a second."""
        raise_recompile_limit(RECOMPILE_LIMIT)
        if self.static:
            return torch.compile(self.function, dynamic=False, options={"deterministic": True})
        return torch.compile(self.function)

    def __call__(self, *operands: K.args, **options: K.kwargs) -> R:
        if has_torch_function(operands):
            return handle_torch_function(self, operands, *operands, **options)
        return self.twin(*operands, **options)


def torch_function(function: Callable[K, R]) -> Callable[K, R]:
    """Decorator of a function whose tensors are passed by position: a `TorchFunctionMode` sees a call of it as one of
    `function`, as it sees functions of torch, and not what it consists of."""

    @wraps(function)
    def call(*operands: K.args, **options: K.kwargs) -> R:
        if has_torch_function(operands):
            return handle_torch_function(function, operands, *operands, **options)
        return function(*operands, **options)

    return call


def region(function: Callable[K, R], compiled: bool, static: bool = False) -> Callable[K, R]:
    """Returns `function`, or its compiled twin, which is compiled when it first runs.

    Shapes that change make a twin dynamic. A `static` one is compiled for each shape instead: its kernels use wide
    loads, but it suits only tensors with the same few shapes in every step. Its sums have an order that no timing
    decides: ranks that reduce the same values, as norms do in tensor parallelism, get the same bits.
    """
    return _compiled(function, static) if compiled else function


@cache
def _compiled(function: Callable[K, R], static: bool) -> Callable[K, R]:
    return CompiledRegion(function, static)
