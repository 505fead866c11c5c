"""How a vocabulary lies over the tensor-parallel ranks, and the check that ids are in it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis


def local_rows(rows: int, axis: Axis) -> tuple[int, int]:
    """[start, stop) of the `rows` held by this rank."""
    assert rows % axis.size == 0, f"{rows} vocabulary rows do not divide over {axis.size} ranks"
    part = rows // axis.size
    return axis.rank * part, (axis.rank + 1) * part


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Every id must lie in [0, size): no rank owns another one, and it would silently count as nothing.

    ValueError on the CPU. On a GPU, where reading the ids would stall it, an assertion on the device.
    """
    message = f"{what} must lie in [0, {size}), the vocabulary; check --vocab-size and the tokenizer of the data"
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if ids.device.type == "cpu" and not 0 <= int(low) <= int(high) < size:
        raise ValueError(f"{message}: found ids from {int(low)} to {int(high)}")
    if ids.is_cuda:
        torch._assert_async((low >= 0) & (high < size), message)
