"""Non-blocking host-to-device copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def copied_to(values: Tensor, device: torch.device | str) -> Tensor:
    """Copies `values` to `device`, to a GPU without blocking the host.

    Host values are pinned first where they are not: the driver waits for a copy from pageable memory.
    """
    device = torch.device(device)
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def integers_on(device: torch.device, values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Copies Python integers to `device`, as a tensor [n]."""
    return copied_to(torch.tensor(values if isinstance(values, np.ndarray) else list(values), dtype=dtype), device)


def integers_of(x: Tensor, expected: Sequence[int]) -> list[int]:
    """Reads the integers of x [n], for which the host waits. A fake tensor, as plans of memory use them, has no values:
    then they are the `expected` ones."""
    return list(expected) if isinstance(x, FakeTensor) else x.tolist()
