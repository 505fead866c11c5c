"""Safe reading of the index file of torch.distributed.checkpoint (DCP).

The index is a pickle. It may come from an untrusted source, so it may only name the types that an index of tensors
consists of, and only files of its own folder.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron.core.dist_checkpointing.pickle_sizes import check_sizes
from megatron.core.dist_checkpointing.torch_file import check_torch_file

INDEX = ".metadata"

MALFORMED = (
    *(ValueError, EOFError, AttributeError, LookupError, TypeError),
    *(RecursionError, MemoryError, pickle.UnpicklingError),
)
"""Exceptions raised by malformed pickles and JSON."""


class IndexReader(dcp.FileSystemReader):
    """Reads DCP's index once, and unpickles only the types that an index consists of. Each tensor's part of a file is
    checked before torch unpickles it."""

    _index: Metadata | None = None

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        if sinfo.transform_descriptors:
            raise pickle.UnpicklingError(f"{INDEX} says that {sinfo.relative_path} is transformed")
        found = super()._slice_file(file, sinfo)
        check_torch_file(found)
        return found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            data = (Path(self.path) / INDEX).read_bytes()
            check_sizes(data)
            index = IndexUnpickler(io.BytesIO(data)).load()
            if not isinstance(index, Metadata):
                raise pickle.UnpicklingError(f"{INDEX} holds a {type(index).__name__}")
            for info in index.storage_data.values():
                if Path(info.relative_path).name != info.relative_path:
                    raise pickle.UnpicklingError(f"{INDEX} names a file of another folder: {info.relative_path!r}")
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
"""Module -> the names in it that an index of tensors may contain."""


RENAMED: dict[tuple[str, str], tuple[str, str]] = {}
"""(module, name) of another program's class -> those of the class of an index that is read in its place."""


class IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module, name = RENAMED.get((module, name), (module, name))
        if name in INDEX_NAMES.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{INDEX} asks for {module}.{name}, which no index of tensors needs")
