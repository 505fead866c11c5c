"""Count the live memory of tensors that operations allocate, on any device, as a memory allocator would report it.

Temporary memory inside a single kernel is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.torch_private import TorchDispatchMode, resize_storage_overload, storage_id
from megatron.core.transformer.activation_store import Pool


class LiveMemory(TorchDispatchMode):
    """Dispatch mode that records the sizes of all live storages that operations allocated, and the peak of the sum of
    these sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        self._inside = self._elsewhere = False

    def count_apart(self, pool: Pool) -> list[int]:
        """Count all buffers that `pool` allocates after this call as host memory, separately from device memory."""
        made, allocate = list[int](), pool.allocate

        def on_host(size: int) -> Tensor:
            made.append(size)
            self._elsewhere = True
            try:
                return allocate(size)
            finally:
                self._elsewhere = False

        pool.allocate = on_host
        return made

    def run_region(self, function: Callable[..., object], args: tuple[object, ...]) -> object:
        """Run a compiled region eagerly, since no compiler accepts tensors without values. Temporary tensors inside the
        region do not count toward the peak, because a single compiled kernel does not allocate them."""
        outermost, self._inside = not self._inside, True
        try:
            return function(*args)
        finally:
            self._inside = not outermost
            self._note_peak()

    def _note_peak(self) -> None:
        if not self._inside:
            self.peak = max(self.peak, self.now)

    def restart_peak(self) -> None:
        """Reset the peak to the current memory."""
        self.peak = self.now

    def _made(self, key: int, size: int) -> None:
        self.sizes[key] = size
        self.now += size
        self._note_peak()

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)  # the storage's memory may have been freed earlier

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a resized storage, whose memory may be freed and allocated again while the storage
        object remains."""
        self.now -= self.sizes.pop(storage_id(storage), 0)
        if size := storage.nbytes():
            self._made(storage_id(storage), size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._elsewhere:
            return out
        if func is resize_storage_overload:
            self._resized(args[0].untyped_storage())
        given = {storage_id(x) for x in tensors_of((args, kwargs))}
        if func is torch.ops.aten.lift_fresh.default:  # this tensor was just created by torch.tensor(...)
            given = set()
        for x in tensors_of(out):
            storage = x.untyped_storage()
            key = storage_id(storage)
            if key not in self.sizes and key not in given:  # views of existing storages allocate nothing
                self._made(key, storage.nbytes())
                weakref.finalize(storage, self._gone, key)
        return out


def tensors_of(values: object) -> list[Tensor]:
    """Return all tensors among an operation's arguments or results."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        return tensors_of(tuple(values.values()))
    return [x for value in values for x in tensors_of(value)] if isinstance(values, (list, tuple)) else []
