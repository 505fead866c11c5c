"""Interface of extensions that keep activations saved for the backward elsewhere than on the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron.core.config.parallel import HOST_MEMORY, ModelParallelConfig


class StoredPass(Protocol):
    """One micro-batch's way through the layers of a stage."""

    def part(self, stored: bool, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Around the forward pass of a part: a layer, or layers that are recomputed together. `stored` says whether
        what it saves is kept elsewhere; its `parameters` never are."""

    def watch(self, output: object) -> None:
        """Told the output of the last part, whose backward begins when its gradient is known."""

    def end(self) -> None:
        """Behind the last part."""


class Pool(Protocol):
    """The memory of a store."""

    nbytes: int
    """Bytes that it holds."""

    allocate: Callable[[int], Tensor]
    """Number of bytes -> a new buffer."""


@runtime_checkable
class ActivationStore(Protocol):
    """Store of one rank's stages, made by an entry of HOST_MEMORY."""

    num_layers: int
    """Layers of each stage, from its first one, whose activations it keeps."""

    sent: int
    """Bytes that have been stored so far."""

    @property
    def pool(self) -> Pool:
        """Pool of memory for the stored activations."""

    def reset(self, pinned: bool = True) -> Pool:
        """Starts again with an empty pool, for plans; `pinned` allows pinned memory."""

    def begin(self, x: Tensor, shared: object) -> StoredPass:
        """A forward pass with input x of a stage's layers. Tensors in `shared`, an object or a mapping, stay."""


def build_store(config: ModelParallelConfig, device: torch.device | str) -> ActivationStore | None:
    """The store that the configuration asks for; None without one."""
    if (name := config.activation_store) is None:
        return None
    store = HOST_MEMORY[name].activations(config, torch.device(device))
    assert isinstance(store, ActivationStore), f"{name} makes no store of activations"
    return store


class Stored(Protocol):
    """Placeholder of a saved tensor in the autograd graph."""

    def stored_tensor(self) -> Tensor:
        """The tensor, on the device again."""


class Saver(Protocol):
    """Receives each tensor that autograd saves."""

    def pack(self, x: Tensor) -> Tensor | Stored:
        """Placeholder of x in the graph: x itself if it stays."""


class _Now(threading.local):
    """Store that saves this thread's tensors: passes that run in turns have a thread each."""

    saver: Saver | None = None


_now = _Now()


@contextmanager
def saving_by(saver: Saver | None) -> Iterator[None]:
    """`packed` asks `saver`."""
    before, _now.saver = _now.saver, saver
    try:
        yield
    finally:
        _now.saver = before


def nothing_saved() -> AbstractContextManager[None]:
    """Around a function that will be recomputed, of which nothing is kept."""
    return saving_by(None)


def packed(x: Tensor) -> Tensor | Stored:
    """For hooks of saved tensors within those of a saver, which alone are called: what stands in the graph for x."""
    return x if _now.saver is None else _now.saver.pack(x)


def unpacked(x: Tensor | Stored) -> Tensor:
    """The tensor that `packed` was given."""
    return x if isinstance(x, Tensor) else x.stored_tensor()


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a tensor, a tuple, a mapping, or an object's attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))
