"""Interface for extensions that store the activations for the backward pass outside of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron.core.config.parallel import HOST_MEMORY, ModelParallelConfig


class StoredPass(Protocol):
    """Forward pass of one micro-batch through the layers of a stage."""

    def part(self, stored: bool, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Return the context manager in which the forward pass of one part of a stage must run. A part is a layer, or
        several layers that are recomputed together.

        If `stored` is True, the tensors that the part saves for the backward pass are stored outside of the device,
        except for its `parameters`.
        """

    def watch(self, output: object) -> None:
        """Receive the output of the most recent part (see `part`). The backward pass of this part starts once the
        gradient of the output is known."""

    def end(self) -> None:
        """Call this method at the end of the forward pass, after the last part."""


class Pool(Protocol):
    """Memory pool of an activation store."""

    nbytes: int
    """Number of bytes that the pool has allocated."""

    allocate: Callable[[int], Tensor]
    """Function that maps a number of bytes to a new buffer of this size."""


@runtime_checkable
class ActivationStore(Protocol):
    """Store to which the stages of one rank offload their activations. An entry of HOST_MEMORY creates the store."""

    num_layers: int
    """Number of layers at the start of each stage whose activations are stored."""

    sent: int
    """Number of bytes stored so far."""

    @property
    def pool(self) -> Pool:
        """Memory pool for the stored activations."""

    def reset(self, pinned: bool = True) -> Pool:
        """Replace the pool with an empty pool. The new pool uses pinned memory only if `pinned` is True. Only plans of
        a run call this method."""

    def begin(self, x: Tensor, shared: object) -> StoredPass:
        """Start a forward pass through the layers of a stage. x is the input of the first layer. Tensors that `shared`,
        an object or a mapping, contains are not stored."""


def build_store(config: ModelParallelConfig, device: torch.device | str) -> ActivationStore | None:
    """Build the store that the configuration selects. Return None if the configuration selects no store."""
    if (name := config.activation_store) is None:
        return None
    store = HOST_MEMORY[name].activations(config, torch.device(device))
    assert isinstance(store, ActivationStore), f"{name} does not create an activation store"
    return store


class Stored(Protocol):
    """Object that the autograd graph holds in place of a saved tensor."""

    def stored_tensor(self) -> Tensor:
        """Return the tensor on the device."""


class Saver(Protocol):
    """Object that replaces each tensor that autograd saves for the backward pass."""

    def pack(self, x: Tensor) -> Tensor | Stored:
        """Return the object that autograd saves instead of x: a placeholder, or x itself if x is not stored."""


class _Now(threading.local):
    """Current `Saver` of each thread, or None. The attribute is thread-local, because interleaved passes of two
    micro-batches run in separate threads."""

    saver: Saver | None = None


_now = _Now()


@contextmanager
def saving_by(saver: Saver | None) -> Iterator[None]:
    """Context manager that makes `packed` pass tensors to `saver` in its body."""
    before, _now.saver = _now.saver, saver
    try:
        yield
    finally:
        _now.saver = before


def nothing_saved() -> AbstractContextManager[None]:
    """Context manager that disables the store in its body, for functions that will be recomputed."""
    return saving_by(None)


def packed(x: Tensor) -> Tensor | Stored:
    """Return the object that the current `Saver` saves instead of x, or x itself if there is no saver. Saved-tensor
    hooks that are nested in those of a saver must call this function, because autograd calls only the innermost
    hooks."""
    return x if _now.saver is None else _now.saver.pack(x)


def unpacked(x: Tensor | Stored) -> Tensor:
    """Return the tensor that was passed to `packed`."""
    return x if isinstance(x, Tensor) else x.stored_tensor()


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield all tensors found in `value`, which may be a tensor, a sequence, a mapping, or an object with
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
