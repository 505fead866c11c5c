"""Streaming writes for torch.distributed.checkpoint (DCP): memory is that of the tensor being written and the next.

DCP's own writer keeps every tensor of a file until the file is closed, which costs nothing for tensors that are in
memory anyway.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

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
