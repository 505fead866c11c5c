"""Activation offloading: tensors that layers save for the backward pass are kept in host memory until the backward pass
(vDNN, Rhu et al., arXiv 1602.08124). ZeRO-Offload (Ren et al., arXiv 2101.06840) offloads optimizer states in a similar
way.

The first layers of each stage are offloaded, because their activations are kept the longest. Layers are offloaded part
by part. A part is a single layer, or a group of layers that are recomputed together. While a part computes, the tensors
that the part saves are copied to the host on a separate stream. The device tensors of a part are freed after the next
part has been computed, so that the device holds the tensors of at most two parts. In the backward pass, the copies of a
part are fetched while the backward pass of the following part computes. Fetched tensors are written to new device
memory. Autograd frees this memory as soon as the backward pass no longer needs the tensors.

Saved-tensor hooks intercept the tensors that autograd keeps (`torch.autograd.graph.saved_tensors_hooks`). The following
tensors stay on the device:

- tensors that do not belong to one micro-batch: parameters, buffers, and tensors that all layers share, such as rotary
  tables;
- the input of the stage, if another stage has sent it, because the pipeline executor holds this tensor anyway;
- tensors with fewer elements than `--min-offloaded-tensor-size`.

Tensors that are views of the same memory are copied once. With recomputation, autograd saves fewer tensors, and only
these tensors are copied. If a whole layer is recomputed, only its input is copied; if some modules of a layer are
recomputed, only tensors outside these modules are copied.
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
    """Host memory of the buffer, a uint8 tensor whose size is a power of two."""

    read: torch.cuda.Event | None = None
    """Event that marks the end of the last copy from the buffer to the device; None on CPU."""


def rounded_up(nbytes: int) -> int:
    """Round a size up to a power of two, as torch's pinned memory allocator does. Rounding limits the number of
    different buffer sizes, even if shapes change from step to step, as in MoE layers."""
    return 1 << max(0, nbytes - 1).bit_length()


class HostPool:
    """Pool of host buffers, grouped by size. The buffers are pinned if they are used for copies between a GPU and the
    host, and pageable on CPU. Pinning takes milliseconds, so each buffer is pinned once. For each size, the pool grows
    to the largest number of buffers that were in use at the same time, and does not shrink.
    """

    def __init__(self, pinned: bool, device: str = "cpu") -> None:
        self.allocate: Callable[[int], Tensor] = lambda size: torch.empty(
            size, dtype=torch.uint8, pin_memory=pinned, device=device
        )
        self.nbytes = 0
        """Total size in bytes of all buffers, both used and free."""
        self._free: dict[int, list[HostBuffer]] = {}
        # Finalizers append returned buffers from any thread, and appending to a deque is thread-safe.
        self._returned: deque[HostBuffer] = deque()

    def take(self, nbytes: int) -> HostBuffer:
        """Return a free buffer of at least `nbytes`. The pool does not hand out the buffer again until the caller
        returns it."""
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
    """Activation offloading for one rank. The rank's pipeline stages share host buffers and streams. Only tensors with
    at least `smallest` elements are offloaded, and only in the first `num_layers` layers of each stage.
    """

    def __init__(self, num_layers: int, smallest: int, device: torch.device | str) -> None:
        self.num_layers = num_layers
        self.smallest = smallest
        self.device = torch.device(device)
        self.reset()
        self.to_host, self.to_device = CopyQueue(self.device), CopyQueue(self.device)

    def reset(self, pinned: bool = True) -> HostPool:
        """Replace the pool of host buffers with an empty pool. If the device is the meta device, as in a memory plan,
        the buffers are meta tensors too."""
        self.sent = 0
        """Number of bytes copied to the host so far."""
        self.pool = HostPool(pinned and self.device.type == "cuda", "meta" if self.device.type == "meta" else "cpu")
        return self.pool

    def begin(self, x: Tensor, shared: object) -> OffloadedPass:
        """Begin the forward pass of one micro-batch through a stage. `x` is the input of the stage. All tensors that
        the object or mapping `shared` contains stay on the device."""
        stays = {storage_id(tensor) for tensor in tensors_in(shared)}
        if x.is_leaf:
            stays.add(storage_id(x))
        return OffloadedPass(self, stays)

    def send(self, x: Tensor) -> tuple[HostBuffer, torch.cuda.Event | None]:
        """Start copying the uint8 tensor `x` [bytes] to the host. The copy waits for all kernels launched so far.
        Return the host buffer, and an event that marks the end of the copy."""
        buffer = self.pool.take(len(x))
        self.to_host.start_after()
        if buffer.read is not None:
            self.to_host.start_after(buffer.read)
        self.sent += len(x)
        return buffer, self.to_host.copy(x, buffer.memory[: len(x)])

    def fetch(self, buffer: HostBuffer, nbytes: int) -> Tensor:
        """Start copying a host buffer to newly allocated device memory. Return the device memory as a uint8 tensor
        [nbytes]. The tensor's contents are valid after the event `buffer.read`."""
        into = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # The copy waits for all kernels launched so far, because these kernels may still use the memory for another
        # tensor.
        self.to_device.start_after()
        buffer.read = self.to_device.copy(buffer.memory[:nbytes], into)
        return into


class OffloadedPass:
    """Offloaded activations of one micro-batch in one pipeline stage, from its forward pass to its backward pass."""

    def __init__(self, offload: ActivationOffload, stays: set[int]) -> None:
        self.offload, self.stays = offload, stays
        self.parts: list[Part | None] = []

    @contextmanager
    def part(self, offloaded: bool, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context manager for the forward pass of one part of the stage. The context manager creates a `Part` object if
        the part is offloaded. On exit, the context manager frees the device tensors that the previous part saved."""
        if offloaded:
            self.parts.append(part := Part(self.offload, self.stays | {storage_id(tensor) for tensor in parameters}))
            with part.saving():
                yield
        else:
            self.parts.append(None)
            yield
        self._let_go(self.parts[-2:-1])

    def watch(self, output: object) -> None:
        """Register hooks on `output`, the return value of the forward pass of the newest `Part`. When the backward pass
        of this part begins, the hooks fetch the saved tensors of this part and of the part before it."""
        parts = [part for part in reversed(self.parts[-2:]) if part is not None]
        for tensor in tensors_in(output) if parts else ():
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: _fetch(parts))

    def end(self) -> None:
        """Free the device tensors that the last `Part` of the stage saved."""
        self._let_go(self.parts[-1:])

    def _let_go(self, parts: Iterable[Part | None]) -> None:
        for part in parts:
            if part is not None:
                part.let_go()


def _fetch(parts: Iterable[Part]) -> None:
    for part in parts:
        part.fetch()


class Part:
    """Tensors that autograd saves when one part of a pipeline stage processes one micro-batch. A part is a single
    layer, or a group of layers that are recomputed together."""

    def __init__(self, offload: ActivationOffload, stays: set[int]) -> None:
        self.offload, self.stays = offload, stays
        self._held: dict[int, _Moved] = {}
        """Storages of saved tensors whose device memory has not been freed yet, keyed by address."""
        self._moved: list[weakref.ref[_Moved]] = []
        """Weak references to the offloaded storages. A reference is dead once autograd no longer needs the storage."""
        self._sent: torch.cuda.Event | None = None
        """Event that marks the end of the copies of all storages to the host; None on CPU."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager in which tensors that autograd saves are offloaded."""
        with saving_by(self), saved_tensors_hooks(self.pack, unpacked):
            yield

    def pack(self, x: Tensor) -> Tensor | _View:
        """Return the placeholder that autograd saves instead of x. If x stays on the device, return x itself."""
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
        """Free the device memory of the saved tensors. Later kernels, which may reuse the memory, wait until the copies
        to the host are complete."""
        self.offload.to_device.wait(self._sent)
        for moved in self._held.values():
            moved.original = None
        self._held.clear()

    def fetch(self) -> None:
        """Start the copies to the device of all offloaded tensors that the backward pass of this part needs."""
        for found in self._moved:
            if (moved := found()) is not None:
                moved.fetch()
        self._moved.clear()


class _View(NamedTuple):
    """Placeholder that autograd keeps instead of a saved tensor. The placeholder describes the tensor as a view of an
    offloaded storage."""

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
    """Storage of saved tensors, which is offloaded to the host and copied back for the backward pass. The object exists
    as long as the autograd graph needs one of its tensors. Afterwards, its host buffer is returned to the pool."""

    def __init__(self, offload: ActivationOffload, original: Tensor) -> None:
        self.offload, self.nbytes = offload, len(original)
        self.original: Tensor | None = original
        self.host: HostBuffer | None
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.host, self.sent = offload.send(original)

    def fetch(self) -> None:
        """Start copying the storage back, unless the copy has already started or the storage is still on the device."""
        if self.host is None or self.original is not None:
            return
        self._back, self._arrived = self.offload.fetch(self.host, self.nbytes), self.host.read
        self.offload.pool.give_back(self.host)
        self.host = None

    def fetched(self) -> Tensor:
        """Return the storage on the device as a uint8 tensor [bytes]. Kernels that are launched after this call may use
        the storage."""
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
        # The host buffer and the device memory must not be reused while a copy between them is in progress.
        self._wait()
        if self.host is not None:
            self.offload.pool.give_back(self.host)


def _bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of x's storage as a uint8 tensor. Trailing bytes that do not form a complete element are
    omitted."""
    elements = x.untyped_storage().nbytes() // x.dtype.itemsize
    return x.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
