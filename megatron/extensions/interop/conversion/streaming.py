"""Streaming checkpoint writer, which holds at most two tensors in memory: the tensor being written and the next one."""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from megatron.core.dist_checkpointing.data_files import DataWriter, item_bytes
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes, without_surroundings
from megatron.core.parallel_state import Axis
from megatron.core.torch_private import wrapper_tensor
from megatron.extensions.interop.conversion.formats import Written

FILE_BYTES = 5_000_000_000
"""File size in bytes above which the writer starts a new file. The output is split into several files so that ranks can
read them in parallel."""


AHEAD_BYTES = 1 << 30
"""Size limit in bytes for prefetching: only tensors up to this size are read while the previous tensor is written."""

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def made_ahead(jobs: Sequence[tuple[int, Callable[[], T]]]) -> Iterator[T]:
    """Call functions in order and yield their results, while a thread computes the next result.

    Each entry of `jobs` is a pair (size, function), where size is the number of bytes of the function's result. A
    result larger than `AHEAD_BYTES` is not computed before it is requested. If a function raises an exception, the
    iterator raises this exception when the result is requested.
    """
    with ThreadPoolExecutor(1, "made-ahead") as pool:
        waiting: Future[T] | None = None
        for (_, make), following in zip_longest(jobs, jobs[1:]):
            result = [make() if waiting is None else waiting.result()]
            waiting = None
            if following is not None and following[0] <= AHEAD_BYTES:
                waiting = pool.submit(following[1])
            yield result.pop()


class StreamingWriter(DataWriter):
    """Checkpoint writer that limits the size of each file. While one tensor is written, the next tensor is read."""

    file_bytes = FILE_BYTES

    def resolved(self, items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[Tensor | io.BytesIO]:
        return made_ahead([(item_bytes(item), partial(planner.resolve_data, item)) for item in items])


class StreamedTensor(ShardedBoxes):
    """Tensor to save, whose values are not computed before the writer writes them.

    `make` is a function that returns the complete tensor. If this process writes only some entries along the first dim,
    pass `parts` instead of `make`. `parts` maps the index of each such entry to a function that returns the entry.

    Save the tensor with a writer that frees tensors after writing them, for example with
    `storage.save(..., writer=StreamingWriter)`.
    """

    parts: Mapping[tuple[int, ...], Callable[[], Tensor]]
    """Maps the offset of each slice to the function that returns the slice."""

    part_shape: tuple[int, ...]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        make: Callable[[], Tensor] | None = None,
        parts: Mapping[int, Callable[[], Tensor]] | None = None,
    ) -> StreamedTensor:
        self = wrapper_tensor(cls, shape, dtype=dtype)
        self.boxes, self.writes = [], True
        if make is not None:
            self.parts, self.part_shape = {(0,) * len(shape): make}, tuple(shape)
        else:
            zeros = (0,) * (len(shape) - 1)
            self.parts = {(entry, *zeros): part for entry, part in (parts or {}).items()}
            self.part_shape = (1, *shape[1:])
        return self

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        part = torch.empty(self.part_shape, dtype=self.dtype, device="meta")
        return ShardedBoxes(self.shape, [(offset, part) for offset in self.parts]).__create_write_items__(fqn, _)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        tensor = self.parts[tuple(index.offset)]().reshape(self.part_shape).contiguous()
        assert tensor.dtype == self.dtype, (index.fqn, tensor.dtype)
        return without_surroundings(tensor)


@dataclass(frozen=True)
class Made:
    """Tensor to write, described by its shape, its dtype and a function that returns its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def counted(self, written: Written) -> Callable[[], Tensor]:
        """Return a function that reads the tensor. To report progress, the function first calls `written` with the size
        of the tensor in bytes."""

        def make() -> Tensor:
            written(self.nbytes)
            return self.read().reshape(self.shape)

        return make


def share(tensors: Mapping[Key, Made], world: Axis) -> Iterator[tuple[Key, Made]]:
    """Yield the tensors that this process must write. Each tensor is assigned to the process that has been assigned the
    fewest bytes so far."""
    loads = [0] * world.size
    for key, made in tensors.items():
        turn = loads.index(min(loads))
        loads[turn] += made.nbytes
        if turn == world.rank:
            yield key, made
