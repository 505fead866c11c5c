"""Documents read by a library: texts, or token ids that are used unchanged."""

from __future__ import annotations

import fnmatch
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from itertools import islice
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from megatron.core.dist_checkpointing.file_storage import UrlPath, located, storage_of
from megatron.extensions.data.text_data.inputs import TextFile, files_below

Value = str | bytes | NDArray | ValueError
"""Content of a record: its text (str or bytes), its token ids [n], or the ValueError that describes why the record is
invalid."""

DEFAULT_KEY = "text"
TOKEN_KEYS = ("input_ids", "tokens")
"""Columns that are used if there is no column with the default name."""


class Documents(ABC):
    """Documents of a data set, in the order of the data set's files. User errors raise ValueError."""

    unit = "row"
    """Name of a record in messages."""

    name: str
    """Name of the data set, as passed to the flag."""

    key: str
    """Column, or member of a sample, that contains the documents."""

    files: list[str]
    """Files that determine the documents: paths, or URLs of object storage."""

    @abstractmethod
    def __iter__(self) -> Iterator[Value]:
        """Yield the value of `key` in each record."""

    def read_from(self, cursor: object) -> Iterator[tuple[object, Value]]:
        """Yield (cursor, document) pairs, starting at a cursor; None is the beginning. Cursors are
        JSON-serializable."""
        number = cursor if isinstance(cursor, int) else 0
        yield from enumerate(islice(self, number, None), number)

    def first(self) -> Value:
        """Return the first document. Raises ValueError if there are no documents."""
        for value in self:
            return value
        raise ValueError("it has no document")


def library(module: str, extra: str) -> ModuleType:
    """Import a library. Raises ValueError with the name of the extra if the library is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"needs the extra [{extra}] ({error}): pip install 'paritrain[{extra}]'") from None


def chosen_key(wanted: str, names: Collection[str]) -> str:
    """Return the column of the documents: the column that --text-key names or, if the default column does not exist, a
    column of token ids."""
    if wanted in names:
        return wanted
    for key in TOKEN_KEYS if wanted == DEFAULT_KEY else ():
        if key in names:
            return key
    raise ValueError(f"no column {wanted!r} (--text-key); the columns are {', '.join(map(repr, sorted(names)[:8]))}")


def document_of(value: object) -> Value:
    """Convert a value of a column to a document."""
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, np.ndarray | list | tuple):
        ids = np.asarray(value)
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)):
            return ids.astype(np.int64) if ids.dtype.kind not in "iu" else ids
        return ValueError(f"neither text nor a list of token ids, but {ids.ndim} dimensions of {ids.dtype}")
    return ValueError(f"neither text nor token ids, but {type(value).__name__}")


def local_path(path: str) -> str:
    """Return the path of a local file, or of a URL's local copy. The processes of a host share this copy. Raises
    OSError."""
    place = located(path)
    return str(storage_of(place).local_file(place)) if isinstance(place, UrlPath) else path


def size_of(path: str) -> int:
    """Return the size of a file in bytes. Raises OSError."""
    place = located(path)
    size = storage_of(place).size(place)
    if size is None:
        raise FileNotFoundError(f"there is no {path}")
    return size


def stored_names(folder: UrlPath, pattern: str = "*") -> list[str]:
    """Return the sorted names in a URL's folder that match a pattern, except hidden names. Raises OSError."""
    names = storage_of(folder).names(folder)
    return sorted(name for name in fnmatch.filter(names, pattern) if not name.startswith("."))


def text_files(paths: Sequence[str]) -> list[TextFile]:
    """Return local files, or local copies of URLs, in the form that `Digests` expects."""
    places = (os.path.realpath(local_path(path)) for path in paths)  # resolve process-specific links
    states = [(path, os.stat(path)) for path in places]
    return [TextFile(path, None, "", state.st_size, str(state.st_mtime_ns)) for path, state in states]


def shown_files(folder: str) -> list[str]:
    """Return the sorted files below a folder, except hidden files."""
    return sorted(path for path in files_below(folder) if not os.path.basename(path).startswith("."))
