"""Store large tensors in memory-mapped files. Only the pages in use occupy memory, because the system writes the other
pages to disk.

The memory of each tensor is a shared mapping of an unnamed file in the temporary folder (TMPDIR). The disk of this
folder must have enough space for all tensors. When the tensor is freed, the system deletes its file.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LARGE = 1 << 16
"""Smallest size in bytes of a tensor that is stored in a file."""

M_MMAP_THRESHOLD = -3
"""Parameter of glibc's mallopt: size in bytes from which a block is mapped separately."""

FACTORIES: tuple[Callable[..., Tensor], ...] = (torch.empty, torch.zeros, torch.full, torch.ones)


def empty_on_disk(like: Tensor) -> Tensor:
    """Return a contiguous tensor of zeros, stored in a file, with the shape and dtype of another tensor.

    Raises OSError if the disk is full.
    """
    handle, name = tempfile.mkstemp(prefix="referee-")
    try:
        os.posix_fallocate(handle, 0, like.numel() * like.element_size())
        return torch.from_file(name, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)
    finally:
        os.close(handle)
        os.unlink(name)


def return_freed_memory() -> None:
    """Make glibc's malloc return the memory of large temporary tensors to the system as soon as the tensors are freed.
    By default, malloc keeps freed memory, and small objects between the freed blocks prevent its reuse. Other
    allocators are not changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= LARGE


class LargeTensorsOnDisk(TorchFunctionMode):
    """Context manager under which factory functions such as `torch.zeros` store large CPU tensors in files. Weight and
    gradient buffers are created with these functions."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = kwargs or {}
        factory = next((each for each in FACTORIES if each is func), None)
        if factory is None or str(given.get("device") or "cpu") != "cpu":
            return func(*args, **given)
        shape = factory(*args, **(given | {"device": "meta"}))
        if not _is_large(shape):
            return func(*args, **given)
        found = empty_on_disk(shape)
        if factory is torch.full:
            value = given["fill_value"] if "fill_value" in given else args[1]
            return found.copy_(torch.as_tensor(value))
        return found.fill_(1) if factory is torch.ones else found


def saved_on_disk() -> AbstractContextManager[object]:
    """Return a context manager under which autograd stores the large tensors that it saves for the backward pass in
    files. Leaf tensors such as weights stay in memory."""

    def pack(tensor: Tensor) -> Tensor:
        if (tensor.requires_grad and tensor.is_leaf) or not _is_large(tensor) or tensor.device.type != "cpu":
            return tensor
        return empty_on_disk(tensor).copy_(tensor.detach())

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
