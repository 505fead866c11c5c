"""Where Triton kernels run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed. Does not import it."""
    return find_spec("triton") is not None


def runs_triton(x: Tensor) -> bool:
    """Whether kernels on `x` can be Triton's."""
    return x.is_cuda and has_triton()
