"""Non-blocking copies between host and device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron.core.torch_private import FakeTensor


def copied_to(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy `values` to `device`. If the device is a GPU, the copy does not block the host.

    Values in pageable host memory are first copied to pinned memory, because the driver blocks the host while it copies
    from pageable memory.
    """
    device = torch.device(device)
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def integers_on(device: torch.device, values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy Python integers to `device`, as a tensor [n]."""
    return copied_to(torch.tensor(values if isinstance(values, np.ndarray) else list(values), dtype=dtype), device)


def has_values(x: Tensor) -> bool:
    """Return whether `x` has values. The fake and meta tensors of memory plans have a shape but no values."""
    return not (x.is_meta or isinstance(x, FakeTensor))


@contextmanager
def threads_on_host(number: int | None) -> Iterator[None]:
    """Context manager that sets the number of torch's host threads; None keeps the number. By default, torchrun limits
    each rank to one host thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


N = TypeVar("N", int, float)


class HostCopy(Generic[N]):
    """Asynchronous copy of `values` to the host.

    Reading the copy waits only for work launched before the copy. If `values` is a fake tensor without data, as in
    memory plans, reading returns `expected`.
    """

    def __init__(self, values: Tensor, expected: Sequence[N] | None = None) -> None:
        fake = expected is not None and not has_values(values)
        self._values: Tensor | list[N] = list(expected or ()) if fake else values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda and not fake else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[N]:
        """Wait for the copy, and return the values [n] as a list."""
        if isinstance(self._values, Tensor):
            if self._copied is not None:
                self._copied.synchronize()
            self._values = self._values.tolist()
        return self._values
