"""A copy of a state in host memory, that training may go on changing the state while the copy is written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.state_dict import StateDict

ALIGNMENT = 64


class HostStaging:
    """One buffer for what this rank writes, kept from save to save; pinned where the state is on a GPU.

    It is allocated pageable and then pinned, as torch's pinned allocator would round its size up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], None] = lambda: None

    def stage(self, tensors: StateDict) -> StateDict:
        """The state that this rank writes, copied. It is good until the next call. Waits for the copies alone."""
        writes = {key: tensor for key, tensor in tensors.items() if tensor.writes and tensor.boxes}
        boxes = {key: dict(reversed(tensor.boxes)) for key, tensor in writes.items()}
        every = [data for found in boxes.values() for data in found.values()]
        devices = {data.device for data in every if data.is_cuda}
        self._reserve(sum(_padded(data) for data in every), pin=bool(devices))
        staged, at = {}, 0
        for key, tensor in writes.items():
            copies = []
            for offset, data in boxes[key].items():
                copy = self._buffer[at : at + data.nbytes].view(data.dtype).view(data.shape)
                copy.copy_(data, non_blocking=True)
                copies.append((offset, copy))
                at += _padded(data)
            staged[key] = ShardedBoxes(tensor.shape, copies)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return staged

    def _reserve(self, size: int, pin: bool) -> None:
        if size <= self._buffer.numel():
            return
        self.release()
        self._buffer = torch.empty(size, dtype=torch.uint8)
        if pin:
            cudart, address = torch.cuda.cudart(), self._buffer.data_ptr()
            if int(cudart.cudaHostRegister(address, size, 0)) == 0:  # else pageable: slower and right all the same
                self._unpin = lambda: cudart.cudaHostUnregister(address)

    def release(self) -> None:
        """Gives the memory back."""
        self._unpin()
        self._unpin = lambda: None
        self._buffer = torch.empty(0, dtype=torch.uint8)


def _padded(data: Tensor) -> int:
    return -(-data.nbytes // ALIGNMENT) * ALIGNMENT
