"""Operations in plain torch in whose place a kernel may compute. No torch itself.

An extension registers kernels; here is only where they are asked for. `LEFT_OUT` are those that this process does not
use, as they are wrong, fail or are slower than the operation on the shapes of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Protocol, TypeVar, cast

from megatron.core.registry import NoFacts, Registry


class Kernel(Protocol):
    def suits(self, *operands: Any) -> bool:
        """Whether it computes with these operands: their device, precision and sizes."""

    def __call__(self, *operands: Any) -> Any: ...


KERNELS: Registry[Kernel, NoFacts] = Registry("kernel", NoFacts, attributes=("suits",))
"""Name of the operation -> its kernel."""

LEFT_OUT: set[str] = set()

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel_for(name: str, *operands: Any) -> Kernel | None:
    """The kernel to compute an operation with these operands by; None for the operation itself."""
    if name in LEFT_OUT or name not in KERNELS:
        return None
    kernel = _imported(name)
    return kernel if kernel.suits(*operands) else None


def operation(plain: Function) -> Function:
    """Decorator of a function of plain torch, called by position, which a kernel of its name may compute."""

    @wraps(plain)
    def compute(*operands: Any) -> Any:
        return (kernel_for(plain.__name__, *operands) or plain)(*operands)

    return cast("Function", compute)


@cache
def _imported(name: str) -> Kernel:
    return KERNELS[name]
