"""torch.compile for element-wise code between GEMMs: each region becomes one kernel.

A region is a pure function of tensors that torch.compile compiles as a whole. GEMMs, attention and collectives are not
part of a region, because compiled code would call the same kernels. Hooks, weight-gradient queues and the order of
collectives are therefore not affected by compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, wraps
from typing import Generic, ParamSpec, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

from megatron.core.torch_private import raise_recompile_limit

RECOMPILE_LIMIT = 64
"""Maximum number of compiled variants of a region, one for each combination of shapes, strides, dtypes and
`requires_grad`. For further combinations, torch runs the region uncompiled."""

K = ParamSpec("K")
R = TypeVar("R")


class CompiledRegion(Generic[K, R]):
    """Callable that runs the compiled version of a function. A `TorchFunctionMode` intercepts the whole region as one
    call, just as it intercepts a call of a torch function."""

    def __init__(self, function: Callable[K, R], static: bool) -> None:
        self.function, self.static = function, static

    @cached_property
    def twin(self) -> Callable[K, R]:
        """Compiled version of the function. The compiled version is created on first use, because importing the
        compiler takes about a second."""
        raise_recompile_limit(RECOMPILE_LIMIT)
        if self.static:
            return torch.compile(self.function, dynamic=False, options={"deterministic": True})
        return torch.compile(self.function)

    def __call__(self, *operands: K.args, **options: K.kwargs) -> R:
        if has_torch_function(operands):
            return handle_torch_function(self, operands, *operands, **options)
        return self.twin(*operands, **options)


def torch_function(function: Callable[K, R]) -> Callable[K, R]:
    """Decorator for a function that takes its tensors as positional arguments.

    A `TorchFunctionMode` intercepts each call of `function` as a whole, as it does for torch's own functions. Without
    this decorator, the mode would intercept the operations inside `function`.
    """

    @wraps(function)
    def call(*operands: K.args, **options: K.kwargs) -> R:
        if has_torch_function(operands):
            return handle_torch_function(function, operands, *operands, **options)
        return function(*operands, **options)

    return call


def region(function: Callable[K, R], compiled: bool, static: bool = False) -> Callable[K, R]:
    """Return `function` or, if `compiled` is True, a compiled version of it. The first call compiles the function.

    If shapes change, torch recompiles the function for dynamic shapes. With `static`, torch compiles a separate version
    for each shape. The kernels of these versions load several elements per instruction. Use `static` only for tensors
    that have the same few shapes in every step. `static` also fixes the order of sums: tensor-parallel ranks that
    reduce the same values, for example in norms, get bitwise identical results.
    """
    return _compiled(function, static) if compiled else function


@cache
def _compiled(function: Callable[K, R], static: bool) -> Callable[K, R]:
    return CompiledRegion(function, static)
