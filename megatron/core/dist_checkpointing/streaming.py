"""Streaming writes for torch.distributed.checkpoint (DCP): memory is that of the tensor being written and the next.

DCP's own writer keeps every tensor of a file until the file is closed, which costs nothing for tensors that are in
memory anyway. `SummedFiles` is the file system for either writer: it knows the checksum of each file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from megatron.core.dist_checkpointing.integrity import SummedFile, Sums

FILE_BYTES = 5_000_000_000
"""Size from which a new file is begun, so that ranks that load can share the reading."""


AHEAD_BYTES = 1 << 30
"""Largest tensor that is made while the one before it is written."""

T = TypeVar("T")


def made_ahead(jobs: Sequence[tuple[int, Callable[[], T]]]) -> Iterator[T]:
    """Calls functions in order and yields their results. While one is used, the next is made on a thread.

    `jobs`: (bytes of the result, function). Results above AHEAD_BYTES are not made ahead. A failure is raised in its
    turn.
    """
    with ThreadPoolExecutor(1, "made-ahead") as pool:
        waiting: Future[T] | None = None
        for (_, make), following in zip_longest(jobs, jobs[1:]):
            result = [make() if waiting is None else waiting.result()]
            waiting = None
            if following is not None and following[0] <= AHEAD_BYTES:
                waiting = pool.submit(following[1])
            yield result.pop()


class StreamingWriter(dcp.FileSystemWriter):
    """Resolves, writes and drops one tensor after the other, in the order of the plan."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        results: list[WriteResult] = []
        items, number = list(plan.items), 0
        made = made_ahead([(item_bytes(item), partial(planner.resolve_data, item)) for item in items])
        while items:
            name = f"{plan.storage_data.prefix}{number}.distcp"
            with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
                while items and stream.tell() < FILE_BYTES:
                    item, start = items.pop(0), stream.tell()
                    data: Any = next(made)
                    if isinstance(data, io.BytesIO):  # an object, which the planner has pickled
                        stream.write(data.getvalue())
                    else:
                        torch.save(data, stream)  # type: ignore[arg-type]
                    del data
                    place = _StorageInfo(name, start, stream.tell() - start)
                    results.append(WriteResult(item.index, place.length, place))
            number += 1
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done


def item_bytes(item: WriteItem) -> int:
    """Bytes of the data of an item to write."""
    data = item.tensor_data
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


class SummedFiles(FileSystem):
    """File system for DCP's writer that records the checksum of each file."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        stream = SummedFile(Path(path))
        try:
            yield cast("io.IOBase", stream)
        except Exception as error:
            # torch's zip writer reports that a write failed, but not why.
            if stream.failure is not None and stream.failure is not error:
                raise stream.failure from error
            raise
        finally:
            stream.close()
        self.sums[Path(path).name] = stream.sums

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.sums:
            self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)
