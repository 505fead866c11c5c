"""Values from the host to a device, for which neither waits for the other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def copied_to(values: Tensor, device: torch.device | str) -> Tensor:
    """`values` on `device`. To a GPU they go from pinned memory, where they are put first unless they are there:
    a copy from any other memory is waited for, or made by way of a small buffer of the driver's."""
    device = torch.device(device)
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def integers_on(device: torch.device, values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """[n] integers that Python knows."""
    return copied_to(torch.tensor(list(values), dtype=dtype), device)
