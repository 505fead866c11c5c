"""The file system through which DCP writes a checkpoint: it knows each file's checksum once it is written."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystem

from megatron.core.dist_checkpointing.integrity import SummedFile, Sums


class SummedFiles(FileSystem):
    """File system for DCP's writer that records the checksum of each file."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        stream = SummedFile(Path(path))
        try:
            yield cast(io.IOBase, stream)
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
