"""Writers of a checkpoint's data files: one tensor after the other, each as `torch.save` writes it.

A model of many small tensors would spend most of a save in `torch.save`, which makes a zip archive and a pickle for
each, and most of a load in `torch.load`. Archives of tensors with the same dtype, shape and strides differ only in the
tensor's data, so the writer assembles them from a template. The bytes in the file are the same. A reader that finds the
bytes of a template around the data needs no unpickling.
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
"""Bytes up to which a tensor is written from a template. Larger ones take longer to write than to pickle."""

Kind = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""dtype, shape and strides of a tensor."""

Template = tuple[bytes, bytes]
"""Bytes of an archive before and after the tensor's data."""


class StoredFiles(FileSystem):
    """The file system of DCP's readers: files of a folder in any storage."""

    def __init__(self) -> None:
        self.ranges: dict[str, list[Range]] = {}
        """Name of a file -> the only ranges of it that are read next, from front to back."""

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
    """The file system of DCP's writers: files of a folder that is not published yet, with the checksum of each.

    DCP writes the index under another name and renames it. As the folder is published whole, it is written under its
    own name here."""

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
            # torch's zip writer reports that a write failed, but not why.
            if stream.failure is not None and stream.failure is not error:
                raise stream.failure from error
            raise
        finally:
            stream.close()
        self.sums[path.name] = stream.sums

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        assert PurePath(new_path).name in self.sums, new_path

    def mkdir(self, path: str | os.PathLike) -> None:
        """The folder was begun."""

    def exists(self, path: str | os.PathLike) -> bool:
        return False  # this save has written the existing files


class Templates:
    """Makes a template for a kind of tensor when it is asked for the second time."""

    def __init__(self) -> None:
        self._made: dict[Kind, Template | None] = {}
        self._met: set[Kind] = set()

    def of(self, kind: Kind) -> Template | None:
        """The template; None at the first time, and for kinds without one."""
        if kind not in self._made:
            if kind not in self._met:
                self._met.add(kind)
                return None
            self._made[kind] = make_template(*kind)
        return self._made[kind]


class TensorFormat:
    """Writes tensors as `torch.save` does, from a template where there is one."""

    def __init__(self) -> None:
        self._templates = Templates()

    def write(self, tensor: Tensor, stream: IO[bytes]) -> None:
        """Writes the bytes of `torch.save(tensor, stream)`. `tensor` is on the CPU."""
        template = self._template(tensor)
        if template is None:
            torch.save(tensor, stream)
            return
        before, after = template
        stream.write(b"".join((before, tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), after)))

    def _template(self, tensor: Tensor) -> Template | None:
        """The template for a small tensor that fills its storage and has no attributes beside its values."""
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
    """Compares the archives of two tensors of one kind. Returns None if they differ in more than the tensor's data, as
    where torch writes checksums into them."""
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
    """Size of an archive made from a template."""
    dtype, shape, _ = kind
    return sum(map(len, template)) + prod(shape) * dtype.itemsize


def tensor_in(archive: bytes, kind: Kind, template: Template) -> Tensor | None:
    """The tensor in an archive; None if the archive is not exactly the template with data of the right size."""
    dtype, shape, stride = kind
    before, after = template
    alike = len(archive) == archive_bytes(kind, template) and archive.startswith(before) and archive.endswith(after)
    if not alike:
        return None
    data = bytearray(archive[len(before) : len(archive) - len(after)])
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, stride)


def contiguous(dtype: torch.dtype, shape: Sequence[int]) -> Kind:
    """The kind of a contiguous tensor."""
    strides = accumulate(reversed(shape[1:]), lambda stride, size: stride * max(size, 1), initial=1)
    return dtype, torch.Size(shape), tuple(reversed([*strides])) if shape else ()


@contextmanager
def one_checksum() -> Iterator[None]:
    """Turns off the checksums that torch.save adds for zip programs. torch.load ignores them; the manifest's checksums
    cover all bytes."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def item_bytes(item: WriteItem) -> int:
    """Bytes of the data of an item to write."""
    data = item.tensor_data
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


class DataWriter(dcp.FileSystemWriter):
    """Resolves, writes and drops one tensor after the other, in the order of the plan."""

    file_bytes: float = inf
    """Size from which a new file is begun."""

    def __init__(self, folder: PurePath) -> None:
        # Files are synced when they are closed: DCP would sync them before Python's buffer is flushed. Without copying
        # ahead DCP makes no CUDA stream; on a thread without a current device it would make one on device 0.
        super().__init__("", sync_files=False, per_thread_copy_ahead=0)
        self.path = folder

    def storage_meta(self) -> StorageMeta:
        """Metadata of the index. The path of another storage than the disk is text, as no program but this one has its
        type."""
        path = self.path if isinstance(self.path, Path) else str(self.path)
        return StorageMeta(checkpoint_id=path, save_id=self.save_id)

    def resolved(self, items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[Tensor | io.BytesIO]:
        """Yields the data of the items in order."""
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
                    if isinstance(data, io.BytesIO):  # an object, which the planner has pickled
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
