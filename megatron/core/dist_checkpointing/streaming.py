"""Streaming writes for torch.distributed.checkpoint (DCP): memory is that of one tensor.

DCP's own writer keeps every tensor of a file until the file is closed, which costs nothing for tensors that are in
memory anyway.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FILE_BYTES = 5_000_000_000
"""Size from which a new file is begun, so that ranks that load can share the reading."""


class StreamingWriter(dcp.FileSystemWriter):
    """Resolves, writes and drops one tensor after the other, in the order of the plan."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        items, number = list(plan.items), 0
        while items:
            name = f"{plan.storage_data.prefix}{number}.distcp"
            with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
                while items and stream.tell() < FILE_BYTES:
                    item, start = items.pop(0), stream.tell()
                    data: Any = planner.resolve_data(item)
                    if isinstance(data, io.BytesIO):  # an object, which the planner has pickled
                        stream.write(data.getvalue())
                    else:
                        torch.save(data, stream)  # type: ignore[arg-type]
                    del data
                    place = _StorageInfo(name, start, stream.tell() - start)
                    results.append(WriteResult(item.index, place.length, place))
            number += 1
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done
