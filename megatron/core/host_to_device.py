"""Non-blocking copies between host and device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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


def has_values(x: Tensor) -> bool:
    """Whether `x` has values: fake and meta tensors, on which plans are made, have a shape alone."""
    return not (x.is_meta or isinstance(x, FakeTensor))


class HostCopy:
    """A copy of `values` to the host, under way. To read it waits for what was launched before it, and for nothing that
    was launched since.

    Where `values` has none, as in plans of memory, they are the `expected` ones.
    """

    def __init__(self, values: Tensor, expected: Sequence[int] | None = None) -> None:
        fake = expected is not None and not has_values(values)
        self._values: Tensor | list[Any] = list(expected or ()) if fake else values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda and not fake else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[Any]:
        """The values, as a list or nested lists."""
        if isinstance(self._values, Tensor):
            if self._copied is not None:
                self._copied.synchronize()
            self._values = self._values.tolist()
        return self._values


@dataclass(eq=False)
class HostBuffer:
    memory: Tensor
    """uint8 [a power of two]"""

    read: torch.cuda.Event | None = None
    """When the last copy from it has ended, on a GPU."""


def rounded_up(nbytes: int) -> int:
    """The size of the buffer for so many bytes: a power of two, as torch's allocator of pinned memory takes it. So few
    sizes occur where shapes differ from step to step, as with experts."""
    return 1 << max(0, nbytes - 1).bit_length()


class HostPool:
    """Host buffers by size: pinned for copies from and to a GPU, plain memory on CPU. Pinning takes milliseconds, so a
    run pins each buffer once. The pool grows to the most that were taken at the same time, of each size, and stays so.
    """

    def __init__(self, pinned: bool, device: str = "cpu") -> None:
        self.allocate: Callable[[int], Tensor] = lambda size: torch.empty(
            size, dtype=torch.uint8, pin_memory=pinned, device=device
        )
        self.nbytes = 0
        """Bytes of all buffers, taken and free."""
        self._free: dict[int, list[HostBuffer]] = {}
        self._returned: deque[HostBuffer] = deque()  # appended to by finalizers, which may run in any thread

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of at least `nbytes`, which nobody else has until it is given back."""
        while self._returned:
            buffer = self._returned.popleft()
            self._free.setdefault(len(buffer.memory), []).append(buffer)
        size = rounded_up(nbytes)
        if free := self._free.get(size):
            return free.pop()
        self.nbytes += size
        return HostBuffer(self.allocate(size))

    def give_back(self, buffer: HostBuffer) -> None:
        self._returned.append(buffer)
