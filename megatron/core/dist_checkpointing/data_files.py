"""Writers of a checkpoint's data files, which contain one tensor after another in `torch.save` format.

With many small tensors, a save would spend most of its time in `torch.save`, which creates a zip archive and a pickle
for each tensor. A load of many small tensors would likewise spend most of its time in `torch.load`. Archives of tensors
with the same dtype, shape and strides differ only in the tensor's data, so the writer assembles them from a template.
The bytes in the file are the same as those of `torch.save`. If a reader recognizes an archive by its template, it
copies the tensor's data without unpickling the archive.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import inf, prod
from pathlib import Path, PurePath
from typing import IO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.integrity import SummedFile, Sums
from megatron.core.dist_checkpointing.ranged_file import Range
from megatron.core.torch_private import storage_info

SMALL = 1 << 20
"""Maximum size in bytes of a tensor that is written from a template. For larger tensors, a template is not worthwhile,
because writing the data takes longer than pickling."""

Kind = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""Dtype, shape and strides of a tensor."""

Template = tuple[bytes, bytes]
"""Content of a torch.save archive without the tensor's data: the bytes before the data, and the bytes after it."""


class StoredFiles(FileSystem):
    """File system through which DCP's readers read the files of a folder in any storage."""

    def __init__(self) -> None:
        self.ranges: dict[str, list[Range]] = {}
        """Byte ranges that will be read next, keyed by file name. A file in this dictionary is read from front to back,
        and only within its ranges."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "rb" and isinstance(path, PurePath), (mode, path)
        storage, ranges = storage_of(path), self.ranges.get(path.name)
        with storage.open(path) if ranges is None else storage.open_ranges(path, ranges) as stream:
            yield cast("io.IOBase", stream)

    def init_path(self, path: str | os.PathLike) -> str | os.PathLike:
        return path

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str | os.PathLike:
        assert isinstance(path, PurePath), path
        return path / suffix


class SummedFiles(StoredFiles):
    """File system for DCP's writers. `SummedFiles` writes the files of a folder that is not yet published, and records
    their checksums.

    DCP writes the index under a temporary name and then renames it. `SummedFiles` writes the index under its final name
    at once, because the whole folder is published only at the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb" and isinstance(path, PurePath), (mode, path)
        path = path.with_suffix("") if path.suffix == ".tmp" else path
        stream = SummedFile(path)
        try:
            yield cast("io.IOBase", stream)
        except Exception as error:
            # torch's zip writer reports that a write failed, but not why
            if stream.failure is not None and stream.failure is not error:
                raise stream.failure from error
            raise
        finally:
            stream.close()
        self.sums[path.name] = stream.sums

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        assert PurePath(new_path).name in self.sums, new_path

    def mkdir(self, path: str | os.PathLike) -> None:
        """Do nothing: the folder already exists."""

    def exists(self, path: str | os.PathLike) -> bool:
        return False  # an existing file was written by this save, so DCP may overwrite it


class Templates:
    """Archive templates, keyed by kind of tensor. The template of a kind is created when it is requested for the second
    time."""

    def __init__(self) -> None:
        self._made: dict[Kind, Template | None] = {}
        self._met: set[Kind] = set()

    def of(self, kind: Kind) -> Template | None:
        """Return the template for tensors of a kind. At the first request for the kind, and for a kind that has no
        template, return None."""
        if kind not in self._made:
            if kind not in self._met:
                self._met.add(kind)
                return None
            self._made[kind] = make_template(*kind)
        return self._made[kind]


class TensorFormat:
    """Writes tensors in `torch.save` format, from a template if the kind of tensor has a template."""

    def __init__(self) -> None:
        self._templates = Templates()

    def write(self, tensor: Tensor, stream: IO[bytes]) -> None:
        """Write the same bytes to `stream` as `torch.save(tensor, stream)`. `tensor` must be on the CPU."""
        template = self._template(tensor)
        if template is None:
            torch.save(tensor, stream)
            return
        before, after = template
        stream.write(b"".join((before, tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), after)))

    def _template(self, tensor: Tensor) -> Template | None:
        """Return the template for `tensor`. Return None unless the tensor is small, fills its storage and has no extra
        attributes."""
        if (
            type(tensor) is not Tensor
            or not 0 < tensor.nbytes <= SMALL
            or tensor.requires_grad
            or vars(tensor)
            or not tensor.is_contiguous()
            or tensor.untyped_storage().nbytes() != tensor.nbytes
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        return self._templates.of((tensor.dtype, tensor.shape, tensor.stride()))


def make_template(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Template | None:
    """Save two tensors of the same kind with torch.save, compare the two archives, and return their common template.

    The function returns None if the archives differ in more than the tensor's data, for example in checksums that torch
    writes.
    """
    size = prod(shape) * dtype.itemsize

    def archive(data: bytes) -> bytes:
        file = io.BytesIO()
        torch.save(torch.frombuffer(bytearray(data), dtype=dtype).as_strided(tuple(shape), tuple(stride)), file)
        return file.getvalue()

    zeros, ones = b"\x00" * size, b"\xff" * size
    first, second = archive(zeros), archive(ones)
    start = next(place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    before, after = first[:start], first[start + size :]
    alike = (before + zeros + after, before + ones + after) == (first, second)
    return (before, after) if alike else None


def archive_bytes(kind: Kind, template: Template) -> int:
    """Return the size in bytes of an archive made from a template."""
    dtype, shape, _ = kind
    return sum(map(len, template)) + prod(shape) * dtype.itemsize


def tensor_in(archive: bytes, kind: Kind, template: Template) -> Tensor | None:
    """Return the tensor that an archive contains. Return None if the archive differs from the template in anything
    except the tensor's data."""
    dtype, shape, stride = kind
    before, after = template
    alike = len(archive) == archive_bytes(kind, template) and archive.startswith(before) and archive.endswith(after)
    if not alike:
        return None
    data = bytearray(archive[len(before) : len(archive) - len(after)])
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, stride)


def contiguous(dtype: torch.dtype, shape: Sequence[int]) -> Kind:
    """Return the `Kind` (dtype, shape and strides) of a contiguous tensor."""
    strides = accumulate(reversed(shape[1:]), lambda stride, size: stride * max(size, 1), initial=1)
    return dtype, torch.Size(shape), tuple(reversed([*strides])) if shape else ()


@contextmanager
def one_checksum() -> Iterator[None]:
    """Disable the zip checksums of torch.save, which torch.load ignores. The checksums in the checkpoint's manifest
    already cover all bytes of the file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def item_bytes(item: WriteItem) -> int:
    """Return the number of data bytes of a write item."""
    data = item.tensor_data
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


class DataWriter(dcp.FileSystemWriter):
    """DCP writer that handles one tensor at a time, in the order of the save plan: it obtains the tensor, writes it and
    frees it."""

    file_bytes: float = inf
    """File size in bytes at which the writer starts a new file."""

    def __init__(self, folder: PurePath) -> None:
        # This writer syncs files when they are closed. DCP would sync a file too early, before Python's buffer is
        # flushed. Without copy-ahead, DCP creates no CUDA stream. With copy-ahead, DCP would create the stream on
        # device 0 if the thread has set no current device.
        super().__init__("", sync_files=False, per_thread_copy_ahead=0)
        self.path = folder

    def storage_meta(self) -> StorageMeta:
        """Return the index metadata. A path outside the local disk is stored as text, because other programs cannot
        unpickle the class of such a path."""
        path = self.path if isinstance(self.path, Path) else str(self.path)
        return StorageMeta(checkpoint_id=path, save_id=self.save_id)

    def resolved(self, items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[Tensor | io.BytesIO]:
        """Yield the data of each write item, in the order of `items`."""
        return map(planner.resolve_data, items)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = list[WriteResult]()
        written = TensorFormat()
        number = 0
        items = list(reversed(plan.items))
        resolved = self.resolved(plan.items, planner)
        while items or not number:
            name = f"{plan.storage_data.prefix}{number}.distcp"
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                start = 0
                while items and start < self.file_bytes:
                    item, data = items.pop(), next(resolved)
                    if isinstance(data, io.BytesIO):  # The planner has already pickled this object.
                        stream.write(data.getvalue())
                    else:
                        written.write(data.detach().cpu(), cast("IO[bytes]", stream))
                    del data
                    end = stream.tell()
                    results.append(WriteResult(item.index, end - start, storage_info(name, start, end - start)))
                    start = end
            number += 1
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done
