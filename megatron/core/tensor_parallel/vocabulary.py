"""Sharding of the vocabulary over the tensor-parallel ranks, and the range check of token ids."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis


def local_rows(rows: int, axis: Axis) -> tuple[int, int]:
    """Returns the vocabulary range [start, stop) that this rank holds."""
    assert rows % axis.size == 0, f"{rows} vocabulary rows do not divide over {axis.size} ranks"
    part = rows // axis.size
    return axis.rank * part, (axis.rank + 1) * part


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Checks that every id lies in [0, size). No rank owns any other id: it would silently contribute nothing.

    Raises ValueError on CPU. On a GPU it asserts on the device, as reading the ids would stall the host.
    """
    message = f"{what} must lie in [0, {size}), the vocabulary; check --vocab-size and the tokenizer of the data"
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if ids.device.type == "cpu" and not 0 <= int(low) <= int(high) < size:
        raise ValueError(f"{message}: found ids from {int(low)} to {int(high)}")
    if ids.is_cuda:
        torch._assert_async((low >= 0) & (high < size), message)
