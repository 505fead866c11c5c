"""Kernels that can replace plain torch for an operation. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Protocol, TypeVar, cast

from megatron.core.registry import NoFacts, Registry


class Kernel(Protocol):
    """A kernel that can replace plain torch for an operation. A call of the kernel takes the same operands as the
    operation."""

    def suits(self, *operands: Any) -> bool:
        """Return whether the kernel supports the device, precision and sizes of these operands."""

    def __call__(self, *operands: Any) -> Any: ...


KERNELS = Registry("kernel", NoFacts, protocol=Kernel)
"""Registered kernels, keyed by the name of the operation. Extensions register kernels; the core library has none."""

LEFT_OUT: set[str] = set()
"""Names of the kernels that this process does not use because they return wrong results, fail or are slower than
torch."""

Function = TypeVar("Function", bound=Callable[..., object])


def kernel_for(name: str, *operands: object) -> Kernel | None:
    """Return the kernel that runs the operation `name` for these operands; None if plain torch runs it."""
    if name in LEFT_OUT or name not in KERNELS:
        return None
    kernel = _kernel(name)
    return kernel if kernel.suits(*operands) else None


def operation(plain: Function) -> Function:
    """Decorate a plain torch function. A kernel that is registered under the function's name may replace the function.
    The decorated function accepts only positional arguments."""

    @wraps(plain)
    def compute(*operands: object) -> object:
        return (kernel_for(plain.__name__, *operands) or plain)(*operands)

    return cast("Function", compute)


@cache
def _kernel(name: str) -> Kernel:
    return KERNELS[name]
