"""Where Triton kernels run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed. Does not import it."""
    return find_spec("triton") is not None


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for what is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def runs_triton(x: Tensor) -> bool:
    """Whether kernels on `x` can be Triton's."""
    return x.is_cuda and has_triton()
