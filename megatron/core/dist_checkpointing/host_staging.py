"""Staging of a checkpoint in host memory, so that training can continue while the copy is written."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.state_dict import StateDict

ALIGNMENT = 64


class HostStaging:
    """One host buffer for all that this rank writes, reused by every save; pinned if the state is on a GPU.

    It is allocated pageable and then pinned, because torch's pinned allocator rounds sizes up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], None] = lambda: None
        self._preparing: threading.Thread | None = None

    def prepare(self, tensors: StateDict) -> None:
        """Allocates the buffer on a thread: the first save would otherwise wait for it, longer than for the copy."""
        every = [data for found in _written(tensors).values() for data in found.values()]
        device = next((data.device for data in every if data.is_cuda), None)

        def take() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # pinning applies to the device of the thread
            self._reserve(sum(map(_padded, every)), pin=device is not None)
            self._buffer.zero_()

        self._preparing = threading.Thread(target=take, name="staging", daemon=True)
        self._preparing.start()

    def stage(self, tensors: StateDict) -> StateDict:
        """Copies what this rank writes, and waits for the copies alone. The result is valid until the next call."""
        self.wait()
        boxes = _written(tensors)
        every = [data for found in boxes.values() for data in found.values()]
        devices = {data.device for data in every if data.is_cuda}
        self._reserve(sum(map(_padded, every)), pin=bool(devices))
        staged, at = {}, 0
        for key, found in boxes.items():
            copies = []
            for offset, data in found.items():
                copy = self._buffer[at : at + data.nbytes].view(data.dtype).view(data.shape)
                copy.copy_(data, non_blocking=True)
                copies.append((offset, copy))
                at += _padded(data)
            staged[key] = ShardedBoxes(tensors[key].shape, copies)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return staged

    def _reserve(self, size: int, pin: bool) -> None:
        if size <= self._buffer.numel():
            return
        self._free()
        self._buffer = torch.empty(size, dtype=torch.uint8)
        if pin:
            cudart, address = torch.cuda.cudart(), self._buffer.data_ptr()
            # Where it fails, the buffer stays pageable: slower, still correct.
            if int(cudart.cudaHostRegister(address, size, 0)) == 0:
                self._unpin = lambda: cudart.cudaHostUnregister(address)

    def release(self) -> None:
        """Frees the buffer."""
        self.wait()
        self._free()

    def wait(self) -> None:
        """Waits for the allocation that `prepare` started."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _free(self) -> None:
        self._unpin()
        self._unpin = lambda: None
        self._buffer = torch.empty(0, dtype=torch.uint8)


def _written(tensors: StateDict) -> dict[str, dict[tuple[int, ...], Tensor]]:
    """Maps key -> offset -> data of what this rank writes; of equal boxes the first."""
    return {key: dict(reversed(tensor.boxes)) for key, tensor in tensors.items() if tensor.writes and tensor.boxes}


def _padded(data: Tensor) -> int:
    return -(-data.nbytes // ALIGNMENT) * ALIGNMENT
