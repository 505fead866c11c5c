"""Interface of documents that a third-party library reads. A document is a string, or a list of token ids that are used
unchanged."""

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
"""Content of a record: a string (str or bytes), token ids [n], or a ValueError that says why the record is invalid."""

DEFAULT_KEY = "text"
TOKEN_KEYS = ("input_ids", "tokens")
"""Columns of token ids that are used if the data set has no column "text" and --text-key is not set."""


class Documents(ABC):
    """Iterable over the documents of a data set, in the order of its files. Methods raise ValueError if the data set or
    a flag is invalid."""

    unit = "row"
    """Word for a record in error messages, such as "row" or "sample"."""

    name: str
    """Name of the data set, as the user passed it to a flag such as --data-path."""

    key: str
    """Name of the column or of the sample member that contains the documents."""

    files: list[str]
    """Files that determine the documents: paths, or URLs of object storage."""

    @abstractmethod
    def __iter__(self) -> Iterator[Value]:
        """Yield the document of each record: the record's value under `key`."""

    def read_from(self, cursor: object) -> Iterator[tuple[object, Value]]:
        """Yield pairs of a cursor and a document, starting at the document to which `cursor` refers, or at the first
        document if `cursor` is None. Cursors are JSON-serializable."""
        number = cursor if isinstance(cursor, int) else 0
        yield from enumerate(islice(self, number, None), number)

    def first(self) -> Value:
        """Return the first document of the data set. Raises ValueError if there are no documents."""
        for value in self:
            return value
        raise ValueError("it has no document")


def library(module: str, extra: str) -> ModuleType:
    """Import a library. If the library is not installed, this function raises a ValueError that names the package extra
    to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"needs the extra [{extra}] ({error}): pip install 'paritrain[{extra}]'") from None


def chosen_key(wanted: str, names: Collection[str]) -> str:
    """Return the name of the column that contains the documents. --text-key names this column, and its default is
    "text". If --text-key is not set and there is no column "text", return the name of a column of token ids."""
    if wanted in names:
        return wanted
    for key in TOKEN_KEYS if wanted == DEFAULT_KEY else ():
        if key in names:
            return key
    raise ValueError(f"no column {wanted!r} (--text-key); the columns are {', '.join(map(repr, sorted(names)[:8]))}")


def document_of(value: object) -> Value:
    """Convert a value from the data set to a document."""
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, np.ndarray | list | tuple):
        ids = np.asarray(value)
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)):
            return ids.astype(np.int64) if ids.dtype.kind not in "iu" else ids
        return ValueError(f"neither text nor a list of token ids, but {ids.ndim} dimensions of {ids.dtype}")
    return ValueError(f"neither text nor token ids, but {type(value).__name__}")


def local_path(path: str) -> str:
    """Return a local path unchanged. For a URL, return the path of a local copy. All processes on a host share the
    copy. Raises OSError."""
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
    """Describe local files, or local copies of URLs, as the `TextFile` objects that `Digests` expects."""
    # Links are resolved here, because a link such as /proc/self would have a different target in another process.
    places = (os.path.realpath(local_path(path)) for path in paths)
    states = [(path, os.stat(path)) for path in places]
    return [TextFile(path, None, "", state.st_size, str(state.st_mtime_ns)) for path, state in states]


def shown_files(folder: str) -> list[str]:
    """Return the sorted files below a folder, except hidden files."""
    return sorted(path for path in files_below(folder) if not os.path.basename(path).startswith("."))
