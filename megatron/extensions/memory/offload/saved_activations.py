"""Offload of saved activations: what layers save for their backward waits in host memory (Ren et al., ZeRO-Offload,
arXiv 2101.06840, moves states in this way; Rhu et al., vDNN, arXiv 1602.08124, activations).

The layers of a stage that are offloaded are its first ones, whose activations wait longest. Each part, a layer or
layers that are recomputed together, copies what it saves to the host while it computes, on a stream of its own. The
device's tensors are freed when the next part has computed, so at most two parts' tensors are held. In the backward the
copies of a part are fetched while the part after it computes, into memory of their own, which autograd frees as it
would free the originals.

Hooks of saved tensors see what autograd keeps (`torch.autograd.graph.saved_tensors_hooks`). They leave on the device

- parameters and buffers, and what all layers share, as rotary tables: these are not this micro-batch's to let go of;
- the input that another stage has sent, which the pipeline's executor holds;
- tensors with fewer elements than `--min-offloaded-tensor-size`.

Tensors that are views of the same memory travel once. With recomputation, what a part keeps for it travels: the input
of a layer that is recomputed as a whole, or what is left beside recomputed modules.
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
    """When the last copy from it has ended, on a GPU."""


def rounded_up(nbytes: int) -> int:
    """The size of the buffer for this many bytes: a power of two, as torch's allocator of pinned memory takes it. So
    few sizes occur where shapes differ from step to step, as with experts."""
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


class ActivationOffload:
    """Offload of one rank's stages, which share host buffers and streams.

    The first `num_layers` layers of each stage are offloaded, tensors of at least `smallest` elements.
    """

    def __init__(self, num_layers: int, smallest: int, device: torch.device | str) -> None:
        self.num_layers = num_layers
        self.smallest = smallest
        self.device = torch.device(device)
        self.reset()
        self.to_host, self.to_device = CopyQueue(self.device), CopyQueue(self.device)

    def reset(self, pinned: bool = True) -> HostPool:
        """Starts again with an empty pool of host buffers, in plans on meta tensors of meta ones."""
        self.sent = 0
        """Bytes that have been copied to the host so far."""
        self.pool = HostPool(pinned and self.device.type == "cuda", "meta" if self.device.type == "meta" else "cpu")
        return self.pool

    def begin(self, x: Tensor, shared: object) -> OffloadedPass:
        """A forward pass with input x of a stage's layers. Tensors in `shared`, an object or a mapping, stay."""
        stays = {storage_id(tensor) for tensor in tensors_in(shared)}
        if x.is_leaf:
            stays.add(storage_id(x))
        return OffloadedPass(self, stays)

    def send(self, x: Tensor) -> tuple[HostBuffer, torch.cuda.Event | None]:
        """Copies x, uint8 [bytes], to the host, behind what has been launched: (where to, when it is there)."""
        buffer = self.pool.take(len(x))
        self.to_host.start_after()
        if buffer.read is not None:
            self.to_host.start_after(buffer.read)
        self.sent += len(x)
        return buffer, self.to_host.copy(x, buffer.memory[: len(x)])

    def fetch(self, buffer: HostBuffer, nbytes: int) -> Tensor:
        """uint8 [bytes] in new memory of the device, which has arrived when `buffer.read` has happened."""
        into = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.to_device.start_after()  # the memory may have been another tensor's just now
        buffer.read = self.to_device.copy(buffer.memory[:nbytes], into)
        return into


class OffloadedPass:
    """One micro-batch's way through the layers of a stage."""

    def __init__(self, offload: ActivationOffload, stays: set[int]) -> None:
        self.offload, self.stays = offload, stays
        self.parts: list[Part | None] = []

    @contextmanager
    def part(self, offloaded: bool, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Around the forward pass of a part. What the part before it has left on the device is let go of after it."""
        if offloaded:
            self.parts.append(part := Part(self.offload, self.stays | {storage_id(tensor) for tensor in parameters}))
            with part.saving():
                yield
        else:
            self.parts.append(None)
            yield
        self._let_go(self.parts[-2:-1])

    def watch(self, output: object) -> None:
        """When the gradient of the last part's output is known, its backward begins: it needs its own tensors, and the
        part before it will be next."""
        parts = [part for part in reversed(self.parts[-2:]) if part is not None]
        for tensor in tensors_in(output) if parts else ():
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: _fetch(parts))

    def end(self) -> None:
        """Behind the last part."""
        self._let_go(self.parts[-1:])

    def _let_go(self, parts: Iterable[Part | None]) -> None:
        for part in parts:
            if part is not None:
                part.let_go()


def _fetch(parts: Iterable[Part]) -> None:
    for part in parts:
        part.fetch()


class Part:
    """Tensors that one part of a stage has saved of one micro-batch."""

    def __init__(self, offload: ActivationOffload, stays: set[int]) -> None:
        self.offload, self.stays = offload, stays
        self._held: dict[int, _Moved] = {}
        """By memory, while the device has it too."""
        self._moved: list[weakref.ref[_Moved]] = []
        """Those that autograd still needs."""
        self._sent: torch.cuda.Event | None = None
        """When all of them are on the host; None on CPU."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Tensors that autograd saves are offloaded."""
        with saving_by(self), saved_tensors_hooks(self.pack, unpacked):
            yield

    def pack(self, x: Tensor) -> Tensor | _View:
        """Placeholder of x in the graph: x itself if it stays."""
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
        """Lets go of the device's memory: tensors made in it from now on wait until the copies have ended."""
        self.offload.to_device.wait(self._sent)
        for moved in self._held.values():
            moved.original = None
        self._held.clear()

    def fetch(self) -> None:
        """Starts to fetch what the backward needs."""
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
    """The memory of saved tensors: on its way to the host, there, and on its way back. It lives as long as the graph
    needs one of the tensors; its buffer is then free for others."""

    def __init__(self, offload: ActivationOffload, original: Tensor) -> None:
        self.offload, self.nbytes = offload, len(original)
        self.original: Tensor | None = original
        self.host: HostBuffer | None
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.host, self.sent = offload.send(original)

    def fetch(self) -> None:
        """Starts the copy back, once, unless the device has the tensor still."""
        if self.host is None or self.original is not None:
            return
        self._back, self._arrived = self.offload.fetch(self.host, self.nbytes), self.host.read
        self.offload.pool.give_back(self.host)
        self.host = None

    def fetched(self) -> Tensor:
        """The memory on the device, uint8 [bytes], for what is launched from now on."""
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
        self._wait()  # memory that nobody has read may not be given to others while it is written
        if self.host is not None:
            self.offload.pool.give_back(self.host)


def _bytes_of(x: Tensor) -> Tensor:
    """All of the memory that x is a view of, uint8 [bytes], as far as it has whole elements of x."""
    elements = x.untyped_storage().nbytes() // x.dtype.itemsize
    return x.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
