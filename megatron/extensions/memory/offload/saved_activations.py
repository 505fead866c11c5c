"""Offload of saved activations: tensors that layers save for their backward wait in host memory (Ren et al.,
ZeRO-Offload, arXiv 2101.06840, moves states in this way; Rhu et al., vDNN, arXiv 1602.08124, activations).

Of each stage, the first layers are offloaded, because their activations wait longest. A part is one layer, or several
layers that are recomputed together. Each part copies the tensors that it saves to the host while it computes, on a
separate stream. The device's tensors are freed after the next part has computed, so at most two parts' tensors are
held. In the backward, the copies of a part are fetched while the part after it computes. They get new memory, which
autograd frees as it would free the originals.

Hooks for saved tensors see the tensors that autograd keeps (`torch.autograd.graph.saved_tensors_hooks`). They leave on
the device

- parameters and buffers, and tensors that all layers share, such as rotary tables, which do not belong to one
  micro-batch;
- the input that another stage has sent, which the pipeline executor holds;
- tensors with fewer elements than `--min-offloaded-tensor-size`.

Tensors that are views of the same memory are copied once. With recomputation, only the tensors that a part keeps for it
are copied: the input of a layer that is recomputed as a whole, or the tensors outside recomputed modules.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.torch_private import storage_id
from megatron.core.transformer.activation_store import saving_by, tensors_in, unpacked
from megatron.extensions.memory.offload.host_update import CopyQueue


@dataclass(eq=False)
class HostBuffer:
    memory: Tensor
    """uint8 [a power of two]"""

    read: torch.cuda.Event | None = None
    """Event at the end of the last copy from the buffer, on a GPU."""


def rounded_up(nbytes: int) -> int:
    """Buffer size for this many bytes: a power of two, as in torch's allocator of pinned memory. So only a few sizes
    occur even if shapes differ from step to step, as with experts."""
    return 1 << max(0, nbytes - 1).bit_length()


class HostPool:
    """Host buffers by size: pinned for copies from and to a GPU, pageable on CPU. Pinning takes milliseconds, so a run
    pins each buffer once. For each size, the pool grows to the largest number of buffers that were in use at the same
    time, and does not shrink.
    """

    def __init__(self, pinned: bool, device: str = "cpu") -> None:
        self.allocate: Callable[[int], Tensor] = lambda size: torch.empty(
            size, dtype=torch.uint8, pin_memory=pinned, device=device
        )
        self.nbytes = 0
        """Bytes of all buffers, used and free."""
        self._free: dict[int, list[HostBuffer]] = {}
        self._returned: deque[HostBuffer] = deque()  # finalizers append to it, and they may run in any thread

    def take(self, nbytes: int) -> HostBuffer:
        """Return a buffer of at least `nbytes`, which is not in use until it is given back."""
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


class ActivationOffload:
    """Offload for the stages of one rank, which share host buffers and streams.

    Offloads the first `num_layers` layers of each stage, and in them tensors of at least `smallest` elements.
    """

    def __init__(self, num_layers: int, smallest: int, device: torch.device | str) -> None:
        self.num_layers = num_layers
        self.smallest = smallest
        self.device = torch.device(device)
        self.reset()
        self.to_host, self.to_device = CopyQueue(self.device), CopyQueue(self.device)

    def reset(self, pinned: bool = True) -> HostPool:
        """Start again with an empty pool of host buffers. In plans, whose tensors are meta tensors, the buffers are
        too."""
        self.sent = 0
        """Bytes copied to the host so far."""
        self.pool = HostPool(pinned and self.device.type == "cuda", "meta" if self.device.type == "meta" else "cpu")
        return self.pool

    def begin(self, x: Tensor, shared: object) -> OffloadedPass:
        """Begin a forward pass with input x through the layers of a stage. Tensors in `shared`, an object or a mapping,
        stay on the device."""
        stays = {storage_id(tensor) for tensor in tensors_in(shared)}
        if x.is_leaf:
            stays.add(storage_id(x))
        return OffloadedPass(self, stays)

    def send(self, x: Tensor) -> tuple[HostBuffer, torch.cuda.Event | None]:
        """Copy x, uint8 [bytes], to the host after the work launched so far. Returns (buffer, event at the end of the
        copy)."""
        buffer = self.pool.take(len(x))
        self.to_host.start_after()
        if buffer.read is not None:
            self.to_host.start_after(buffer.read)
        self.sent += len(x)
        return buffer, self.to_host.copy(x, buffer.memory[: len(x)])

    def fetch(self, buffer: HostBuffer, nbytes: int) -> Tensor:
        """uint8 [bytes] in new device memory; the contents are there once `buffer.read` has occurred."""
        into = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.to_device.start_after()  # the memory may have belonged to another tensor until now
        buffer.read = self.to_device.copy(buffer.memory[:nbytes], into)
        return into


class OffloadedPass:
    """One micro-batch in the layers of a stage."""

    def __init__(self, offload: ActivationOffload, stays: set[int]) -> None:
        self.offload, self.stays = offload, stays
        self.parts: list[Part | None] = []

    @contextmanager
    def part(self, offloaded: bool, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context of the forward pass of a part. Device tensors that the previous part has saved are freed after it."""
        if offloaded:
            self.parts.append(part := Part(self.offload, self.stays | {storage_id(tensor) for tensor in parameters}))
            with part.saving():
                yield
        else:
            self.parts.append(None)
            yield
        self._let_go(self.parts[-2:-1])

    def watch(self, output: object) -> None:
        """Called when the gradient of the last part's output is known and its backward begins: that part needs its own
        tensors, and the previous part is next."""
        parts = [part for part in reversed(self.parts[-2:]) if part is not None]
        for tensor in tensors_in(output) if parts else ():
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: _fetch(parts))

    def end(self) -> None:
        """Called after the last part."""
        self._let_go(self.parts[-1:])

    def _let_go(self, parts: Iterable[Part | None]) -> None:
        for part in parts:
            if part is not None:
                part.let_go()


def _fetch(parts: Iterable[Part]) -> None:
    for part in parts:
        part.fetch()


class Part:
    """Tensors that one part of a stage has saved for one micro-batch."""

    def __init__(self, offload: ActivationOffload, stays: set[int]) -> None:
        self.offload, self.stays = offload, stays
        self._held: dict[int, _Moved] = {}
        """Saved storages by address, while they are still on the device."""
        self._moved: list[weakref.ref[_Moved]] = []
        """Storages that autograd still needs."""
        self._sent: torch.cuda.Event | None = None
        """Event after which all of them are on the host; None on CPU."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which tensors that autograd saves are offloaded."""
        with saving_by(self), saved_tensors_hooks(self.pack, unpacked):
            yield

    def pack(self, x: Tensor) -> Tensor | _View:
        """Return the placeholder of x in the graph; x itself if it stays on the device."""
        offload, key = self.offload, storage_id(x)
        if x.layout != torch.strided or x.device.type != offload.device.type or x.numel() < offload.smallest:
            return x
        if key in self.stays:
            return x
        if key not in self._held:
            self._held[key] = moved = _Moved(offload, _bytes_of(x))
            self._sent = moved.sent
            self._moved.append(weakref.ref(moved))
        return _View(self._held[key], x.dtype, x.size(), x.stride(), int(x.storage_offset()))

    def let_go(self) -> None:
        """Free the device memory: tensors allocated in it from now on wait until the copies have ended."""
        self.offload.to_device.wait(self._sent)
        for moved in self._held.values():
            moved.original = None
        self._held.clear()

    def fetch(self) -> None:
        """Start to fetch the tensors that the backward needs."""
        for found in self._moved:
            if (moved := found()) is not None:
                moved.fetch()
        self._moved.clear()


class _View(NamedTuple):
    """A tensor in offloaded memory."""

    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def stored_tensor(self) -> Tensor:
        memory = self.moved.fetched()
        elements = len(memory) // self.dtype.itemsize
        return memory[: elements * self.dtype.itemsize].view(self.dtype).as_strided(*self[2:])


class _Moved:
    """Storage of saved tensors, which moves to the host and back. It lives as long as the graph needs one of its
    tensors; then its buffer is free for others."""

    def __init__(self, offload: ActivationOffload, original: Tensor) -> None:
        self.offload, self.nbytes = offload, len(original)
        self.original: Tensor | None = original
        self.host: HostBuffer | None
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.host, self.sent = offload.send(original)

    def fetch(self) -> None:
        """Start the copy back, once, unless the storage is still on the device."""
        if self.host is None or self.original is not None:
            return
        self._back, self._arrived = self.offload.fetch(self.host, self.nbytes), self.host.read
        self.offload.pool.give_back(self.host)
        self.host = None

    def fetched(self) -> Tensor:
        """The storage on the device, uint8 [bytes], for kernels that are launched from now on."""
        if self.original is not None:
            return self.original
        self.fetch()
        assert self._back is not None
        self._wait()
        return self._back

    def _wait(self) -> None:
        self.offload.to_device.wait(self._arrived)
        self._arrived = None

    def __del__(self) -> None:
        self._wait()  # memory that nobody has read must not be reused while it is written
        if self.host is not None:
            self.offload.pool.give_back(self.host)


def _bytes_of(x: Tensor) -> Tensor:
    """The whole storage of x, uint8 [bytes], as far as it has whole elements of x."""
    elements = x.untyped_storage().nbytes() // x.dtype.itemsize
    return x.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
