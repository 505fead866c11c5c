"""Interfaces for extensions that offload activations, that is, store them outside of the device until the backward
pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron.core.config.parallel import HOST_MEMORY, ModelParallelConfig


class StoredPass(Protocol):
    """Interface to one micro-batch's forward pass through the layers of a stage. The activations of the pass are
    offloaded."""

    def part(self, stored: bool, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Return the context manager in which one part of the stage must run. A part is a single layer, or several
        layers that are recomputed together.

        If `stored` is True, the tensors that the part saves for the backward pass are offloaded, except for
        `parameters`.
        """

    def watch(self, output: object) -> None:
        """Record the output of the most recent part (see `part`). The backward pass of the part starts when the
        gradient of this output has been computed."""

    def end(self) -> None:
        """End the forward pass. This method is called after the last part."""


class Pool(Protocol):
    """Memory pool of an `ActivationStore`."""

    nbytes: int
    """Number of bytes that the pool has allocated."""

    allocate: Callable[[int], Tensor]
    """Function that takes a size in bytes and returns a new buffer of this size."""


@runtime_checkable
class ActivationStore(Protocol):
    """Store to which the stages of one rank offload their activations. An entry of the registry HOST_MEMORY creates the
    store."""

    num_layers: int
    """Number of layers, counted from the first layer of each stage, whose activations are offloaded."""

    sent: int
    """Number of bytes that have been offloaded so far."""

    @property
    def pool(self) -> Pool:
        """Memory pool that contains the offloaded activations."""

    def reset(self, pinned: bool = True) -> Pool:
        """Replace the memory pool with an empty pool. The new pool uses pinned memory only if `pinned` is True. This
        method is called for memory planning only."""

    def begin(self, x: Tensor, shared: object) -> StoredPass:
        """Start a forward pass through the layers of a stage. `x` is the input of the first layer. Tensors in `shared`,
        which is an object or a mapping, are not offloaded."""


def build_store(config: ModelParallelConfig, device: torch.device | str) -> ActivationStore | None:
    """Build the activation store that the configuration selects, or return None if it selects no store."""
    if (name := config.activation_store) is None:
        return None
    store = HOST_MEMORY[name].activations(config, torch.device(device))
    assert isinstance(store, ActivationStore), f"{name} does not create an activation store"
    return store


class Stored(Protocol):
    """Object that the autograd graph holds in place of a saved tensor."""

    def stored_tensor(self) -> Tensor:
        """Return the saved tensor as a tensor on the device."""


class Saver(Protocol):
    """Object that can replace the tensors that autograd saves for the backward pass."""

    def pack(self, x: Tensor) -> Tensor | Stored:
        """Return the object that autograd saves instead of x: a placeholder, or x itself if x is not offloaded."""


class _Now(threading.local):
    """Current `Saver` of the calling thread, or None. The attribute is thread-local, because interleaved passes of two
    micro-batches run in separate threads."""

    saver: Saver | None = None


_now = _Now()


@contextmanager
def saving_by(saver: Saver | None) -> Iterator[None]:
    """Context manager that makes `saver` the current `Saver` within the block. The function `packed` passes tensors to
    the current `Saver`."""
    before, _now.saver = _now.saver, saver
    try:
        yield
    finally:
        _now.saver = before


def nothing_saved() -> AbstractContextManager[None]:
    """Context manager that disables offloading within the block, for functions that will be recomputed."""
    return saving_by(None)


def packed(x: Tensor) -> Tensor | Stored:
    """Return the object that autograd should save instead of x. The current `Saver` determines the object. Without a
    `Saver`, the object is x itself. Saved-tensor hooks of other code must call this function, because autograd calls
    only the innermost hooks."""
    return x if _now.saver is None else _now.saver.pack(x)


def unpacked(x: Tensor | Stored) -> Tensor:
    """Return the tensor for which `packed` returned x."""
    return x if isinstance(x, Tensor) else x.stored_tensor()


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield all tensors that `value` contains. `value` may be a tensor, a sequence, a mapping, or an object with
    attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))
