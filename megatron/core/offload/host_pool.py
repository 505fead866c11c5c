"""Host buffers that are taken and returned: pinned for copies from and to a GPU, plain memory on CPU. Pinning memory
takes milliseconds, so a run pins each buffer once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
    """Buffers by size. It grows to the most that were taken at the same time, of each size, and stays so."""

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
