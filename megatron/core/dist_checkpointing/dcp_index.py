"""Reader for untrusted checkpoints of torch.distributed.checkpoint (DCP).

The index is a pickle that may come from an untrusted source. The pickle may therefore refer only to the classes that a
tensor index needs, and only to files in the folder of the index. A small tensor is copied without unpickling if all
bytes around its data are exactly those that torch would write. The pickles of all other tensors are checked before
torch reads them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import PurePath
from typing import IO, TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.core.dist_checkpointing.data_files import (
    SMALL,
    Kind,
    StoredFiles,
    Template,
    Templates,
    archive_bytes,
    contiguous,
    one_checksum,
    tensor_in,
)
from megatron.core.dist_checkpointing.pickle_sizes import check_sizes
from megatron.core.dist_checkpointing.ranged_file import Range
from megatron.core.dist_checkpointing.torch_file import check_torch_file

if TYPE_CHECKING:
    from megatron.core.torch_private import StorageInfo

INDEX = ".metadata"

MALFORMED = (
    *(ValueError, EOFError, AttributeError, LookupError, TypeError),
    *(RecursionError, MemoryError, pickle.UnpicklingError),
)
"""Exceptions raised by malformed pickles and JSON."""


class IndexReader(dcp.FileSystemReader):
    """DCP reader that reads the index only once, and rejects an index that refers to classes which no tensor index
    needs. Before torch unpickles a tensor, the tensor's part of the file is checked."""

    def __init__(self, folder: PurePath) -> None:
        super().__init__("")
        self._files = StoredFiles()
        self.path, self.fs = folder, self._files
        self._index: Metadata | None = None
        self._templates = Templates()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan: small tensors by template, everything else through DCP.

        Both reading methods, by template and through DCP, read each file from front to back. Hardly any byte of a
        remote file is therefore requested twice.
        """
        in_order = sorted(plan.items, key=lambda item: self.storage_data[item.storage_index].offset)
        by_file: dict[str, list[tuple[ReadItem, Kind, Template]]] = {}
        with one_checksum():
            for item in in_order:
                kind, info = self._small_kind(item), self.storage_data[item.storage_index]
                if kind is None or (template := self._template(kind)) is None:
                    continue
                # A tensor whose entry states a forged length is not read with a template.
                if info.length == archive_bytes(kind, template):
                    by_file.setdefault(info.relative_path, []).append((item, kind, template))
        self._announce([item for items in by_file.values() for item, _, _ in items])
        read = {id(item) for name, items in by_file.items() for item in self._read_small(name, items, planner)}
        left = [item for item in in_order if id(item) not in read]
        self._announce(left)
        return super().read_data(replace(plan, items=left), planner)

    def _announce(self, items: Sequence[ReadItem]) -> None:
        """Inform the file system about the ranges that will be read next."""
        self._files.ranges = {}
        for item in items:
            info = self.storage_data[item.storage_index]
            part = Range(info.offset, info.offset + info.length)
            self._files.ranges.setdefault(info.relative_path, []).append(part)

    def _read_small(
        self, name: str, items: Sequence[tuple[ReadItem, Kind, Template]], planner: LoadPlanner
    ) -> Iterator[ReadItem]:
        """Load those items of a file that match their template byte for byte, and yield the loaded items."""
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
            for item, kind, template in items:
                info = self.storage_data[item.storage_index]
                stream.seek(info.offset)
                if (whole := tensor_in(stream.read(info.length), kind, template)) is None:
                    continue
                box = zip(item.storage_offsets, item.lengths, strict=True)
                tensor = whole[tuple(slice(offset, offset + length) for offset, length in box)]
                target = planner.resolve_tensor(item).detach()
                if target.size() == tensor.size():
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)
                    yield item

    def _small_kind(self, item: ReadItem) -> Kind | None:
        """Return the `Kind` (dtype, shape and strides) of a small tensor, as recorded in the index. Return None for
        larger tensors, and for items that are not tensors."""
        at, info = item.storage_index, self.storage_data[item.storage_index]
        entry = self.read_metadata().state_dict_metadata.get(at.fqn)
        if item.type != LoadItemType.TENSOR or not isinstance(entry, TensorStorageMetadata) or at.index is None:
            return None
        chunk, dtype = entry.chunks[at.index], entry.properties.dtype
        if chunk.offsets != at.offset or info.transform_descriptors:
            return None
        size = prod(chunk.sizes) * dtype.itemsize
        return contiguous(dtype, chunk.sizes) if 0 < size <= min(SMALL, info.length) else None

    def _template(self, kind: Kind) -> Template | None:
        with suppress(RuntimeError, TypeError, ValueError):  # a forged index may contain a dtype without a template
            return self._templates.of(kind)
        return None

    def _slice_file(self, file: IO[bytes], sinfo: StorageInfo) -> IO[bytes]:
        if sinfo.transform_descriptors:
            raise pickle.UnpicklingError(f"{INDEX} says that {sinfo.relative_path} is transformed")
        found = super()._slice_file(file, sinfo)
        check_torch_file(found)
        return found

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        if self._index is None:
            with self.fs.create_stream(self.fs.concat_path(self.path, INDEX), "rb") as stream:
                data = stream.read()
            check_sizes(data)
            index = IndexUnpickler(io.BytesIO(data)).load()
            if not isinstance(index, Metadata):
                raise pickle.UnpicklingError(f"{INDEX} holds a {type(index).__name__}")
            for info in index.storage_data.values():
                if PurePath(info.relative_path).name != info.relative_path:
                    raise pickle.UnpicklingError(
                        f"{INDEX} refers to a file outside the checkpoint folder: {info.relative_path!r}"
                    )
            index.storage_meta = index.storage_meta or StorageMeta()
            index.storage_meta.load_id = self.load_id
            self._index = index
        return self._index


INDEX_NAMES = {
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
}
"""Names of the classes and functions that the pickle of a tensor index may refer to, keyed by module."""


RENAMED: dict[tuple[str, str], tuple[str, str]] = {}
"""Replacements for classes of other programs, which are applied when an index is read. A key is the (module, name) by
which a pickle refers to a class. The value is the (module, name) of the class that is used instead."""


class IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        module, name = RENAMED.get((module, name), (module, name))
        if name in INDEX_NAMES.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{INDEX} asks for {module}.{name}, which is not allowed in a tensor index")
